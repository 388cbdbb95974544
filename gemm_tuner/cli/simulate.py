"""`gemm-tuner simulate`: predict how a call scales with its threads, also beyond those here."""

import re
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from gemm_tuner.bench.parts import PartsTimer, build_parts_timer
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.places import check_place
from gemm_tuner.cli.reports.plotting import check_plots
from gemm_tuner.cli.reports.simulate_report import (
    Curve,
    Simulation,
    print_curves,
    print_ranking,
    ranking_facts,
    simulation_facts,
)
from gemm_tuner.cli.terminal.interrupt import aborting
from gemm_tuner.cli.terminal.output import print_json
from gemm_tuner.cli.terminal.progress_line import ProgressLine
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext, Regime, check_threads
from gemm_tuner.domain.cpu import isa_text
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.topology import Level
from gemm_tuner.errors import InvalidSetting, IsaNotUsable, KernelRejected
from gemm_tuner.machine.detect import detect_cpu, why_not_usable
from gemm_tuner.machine.topology import detect_topology
from gemm_tuner.scaling.ranking import ranked_for_threads
from gemm_tuner.scaling.server import Server, server_here, server_like
from gemm_tuner.scaling.simulate import Simulated, predicted_part_ns, simulated, traffic_of
from gemm_tuner.scratch import scratch_folder
from gemm_tuner.select.recorded import recorded_winners, records_at_hand, shipped_records_of
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.cores import core_named, core_of
from gemm_tuner.space.limits import check_covers
from gemm_tuner.space.ranking import shortlist
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import database_file, default_database_url, open_database
from gemm_tuner.tuning.progress import Progress
from gemm_tuner.tuning.prove import prove

_RANGE = re.compile(r"(\d{1,6})\.\.(\d{1,6})")
_NUMBERS = re.compile(r"\d{1,6}(,\d{1,6})*")
_PICTURES = (".svg", ".png")
_MOST_SOCKETS = 8  # that servers have, whose CPUs reach each other without a switch


def simulate(
    m: options.Rows,
    n: Annotated[int, typer.Argument(metavar="N", help="Columns of y")],
    k: options.Depth,
    *,
    threads: Annotated[
        str, typer.Option(help="Threads, as 1,2,48; or 1..128 for each doubling from 1")
    ] = "1..64",
    m_of_call: Annotated[
        int | None, typer.Option(help="Rows of the call, where M is a range; by default the most")
    ] = None,
    dtype: options.DTypeName = "f32",
    epilogue: options.EpilogueText = "none",
    w_layout: options.LayoutName = "nk",
    groups: options.Groups = None,
    reduction: options.ReductionName = "any",
    regime: options.RegimeChoice = "both",
    candidate: Annotated[
        str | None,
        typer.Option(help="Text of the kernel; by default the winner, or the model's first choice"),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="CPU", help="Predict for a CPU that is not here, such as zen5"),
    ] = None,
    sockets: Annotated[
        int | None, typer.Option(help="Sockets of the server; by default as few as are needed")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(help="Print so many kernels instead, ordered by speed on the most threads"),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the speed-ups, as SVG or PNG")
    ] = None,
    compiler: options.Compiler = None,
    db: options.DatabaseUrl = None,
    as_json: options.AsJson = False,
) -> None:
    """Predict how long a call takes on many threads, and what bounds it.

    Each part of the kernel is timed alone here, or predicted for a target. Beyond the CPUs here, a
    server like that of the table of cores is assumed.
    """
    counts = parse_threads(threads)
    layout = options.with_groups(w_layout, groups)
    problem = Problem.create(
        m, n, k, dtype=dtype, w_layout=layout, epilogue=epilogue, reduction=reduction
    )
    problem.check_work()
    rows = _rows_of_call(problem, m_of_call)
    regimes = Regime.parse_choice(regime)
    # A kernel that is named, or one for another CPU, is not looked for in a database.
    _check_plot(plot, [] if target or candidate else [db])
    if rank is not None and (plot or candidate or db or compiler):
        raise InvalidSetting(
            "--rank compares kernels by the model; leave out --candidate, --plot, --db and "
            "--compiler."
        )
    server = _server(target, sockets, max(counts))
    if rank is not None:
        _print_ranking(
            problem,
            server,
            threads=max(counts),
            rows=rows,
            regimes=regimes,
            count=rank,
            as_json=as_json,
        )
        return
    chosen, reason = _chosen(problem, server, candidate, target, db)
    # Of several kernels for a range of m, the one that computes this call.
    ((_rows, candidate_of_call),) = chosen.kernels(Rows(low=rows, high=rows))
    asked = Simulation(
        problem=problem,
        rows=rows,
        candidate=candidate_of_call,
        reason=reason,
        server=server,
        is_timed=target is None,
    )
    with aborting():
        timer = _timer(asked, compiler) if asked.is_timed else None
        curves = _curves(asked, counts=counts, regimes=regimes, timer=timer)
    if plot is not None:
        from gemm_tuner.cli.reports.scaling_plot import write_scaling_plot  # noqa: PLC0415 - see plotting

        title = f"{problem.text}\n{asked.candidate.text}\n{server.text}"
        write_scaling_plot(plot, title, {one.regime.value: one.points for one in curves})
    if as_json:
        print_json(simulation_facts(asked, curves))
        return
    print_curves(asked, curves)


def parse_threads(text: str) -> tuple[int, ...]:
    """Return the numbers meant by `1,2,48`, or by `1..128`: doubled from the first, and the last.

    Raises:
        InvalidSetting: `text` is neither, or a number is out of range.
    """
    if match := _RANGE.fullmatch(text):
        first, last = (check_threads(int(number)) for number in match.groups())
        if first > last:
            raise InvalidSetting(f"threads {text!r} ends before it begins; swap the numbers.")
        doubled = [first << turn for turn in range(last.bit_length())]
        return tuple(dict.fromkeys([*(one for one in doubled if one < last), last]))
    if not _NUMBERS.fullmatch(text):
        raise InvalidSetting(f"threads {text!r} is not understood; write 1,2,48 or 1..128.")
    return tuple(sorted({check_threads(int(number)) for number in text.split(",")}))


def _rows_of_call(problem: Problem, asked: int | None) -> int:
    rows = problem.m.high if asked is None else asked
    if not max(1, problem.m.low) <= rows <= problem.m.high:
        raise InvalidSetting(
            f"--m-of-call {rows} is none of the rows {problem.m.text}; choose one of them."
        )
    return rows


def _check_plot(plot: Path | None, databases: Sequence[str | None]) -> None:
    if plot is None:
        return
    if plot.suffix not in _PICTURES:
        raise InvalidSetting(
            f"file {str(plot)!r} is no picture that can be drawn; end its name in "
            f"{' or '.join(_PICTURES)}."
        )
    check_place(plot, databases=databases)
    check_plots("a simulation")


def _server(target: str | None, sockets: int | None, threads: int) -> Server:
    """Return this machine if it has the threads, or else as many sockets as are asked or needed."""
    cpu = detect_cpu()
    if target is None and sockets is None:
        topology = detect_topology()
        if threads <= min(topology.usable_cpus, topology.count(Level.CORE)):
            return server_here(cpu, topology)
    core = core_named(target) if target else core_of(cpu)
    cores = core.cpu.physical_cores
    needed = ceil(threads / cores)
    if sockets is not None and not 1 <= sockets <= _MOST_SOCKETS:
        raise InvalidSetting(f"--sockets {sockets} is out of range; use 1 to {_MOST_SOCKETS}.")
    if needed > _MOST_SOCKETS:
        raise InvalidSetting(
            f"{threads} threads need {needed} sockets of {core.cpu.brand}, of which a server has "
            f"{_MOST_SOCKETS} at most; use at most --threads {_MOST_SOCKETS * cores}."
        )
    if sockets is not None and sockets < needed:
        raise InvalidSetting(
            f"--sockets {sockets} of {cores} cores each are too few for {threads} threads; give "
            f"--sockets {needed}."
        )
    if (sockets or needed) > 1 and not core.shared.link_gb_s:
        raise InvalidSetting(
            f"{core.cpu.brand} is made for one socket; use at most --threads {cores}."
        )
    return server_like(core, sockets=sockets or needed, cpu=None if target else cpu)


def _chosen(
    problem: Problem, server: Server, text: str | None, target: str | None, db: str | None
) -> tuple[Candidate, str]:
    """Return the kernel to simulate, and in words why this one."""
    if text is not None:
        candidate = Candidate.parse(text)
        missing = check_covers(problem, candidate).isa - server.cpu.isa
        if missing:
            why = f"{target} lacks it" if target else why_not_usable(missing)
            raise IsaNotUsable(f"{candidate.text} needs {isa_text(missing)}: {why}; name another.")
        return candidate, "as asked"
    space = Space(problem=problem, cpu=server.cpu)
    if target is None:
        url = db or default_database_url()
        file = database_file(url)
        if db is None and file is not None and not file.exists():
            records = shipped_records_of(problem, server.cpu)
        else:
            repository = Repository(open_database(url, may_create=False))
            records = records_at_hand(repository, problem, server.cpu)
        winners = recorded_winners(records, space, ExecutionContext(), most=1)
        for winner in winners.winners:
            return winner.trial.candidate, f"the winner in {winner.source}"
    return shortlist(space, 1)[0], "the model's first choice"


def _timer(asked: Simulation, compiler: str | None) -> PartsTimer:
    """Prove and build the kernel that is to be timed; what was tried is not kept."""
    toolchain, cpu = find_toolchain(compiler), detect_cpu()
    with scratch_folder("gemm-tuner-simulate-") as folder:
        engine = open_database(f"sqlite:///{folder}/proof.sqlite3")
        try:
            trial = prove(
                asked.problem,
                asked.candidate,
                cpu=cpu,
                repository=Repository(engine),
                toolchain=toolchain,
            )
        finally:
            engine.dispose()
    if trial.outcome is not Outcome.CORRECT:
        raise KernelRejected(
            f"{asked.candidate.text} is not timed: {trial.outcome.value}, {trial.detail}; "
            "name another by --candidate."
        )
    return build_parts_timer(
        asked.problem, asked.candidate, cpu=cpu, toolchain=toolchain, rows=asked.rows
    )


def _curves(
    asked: Simulation,
    *,
    counts: Sequence[int],
    regimes: Sequence[Regime],
    timer: PartsTimer | None,
) -> list[Curve]:
    """Return, for each regime, the calls in one thread and in each number of threads."""
    # One thread is what the others are compared with.
    wanted = [(regime, threads) for regime in regimes for threads in sorted({1, *counts})]
    calls: dict[Regime, list[Simulated]] = {regime: [] for regime in regimes}
    started_s = monotonic()
    with ProgressLine(asked.problem.sizes_text, later_s=0.0) as line:
        for done, (regime, threads) in enumerate(wanted):
            if timer is not None and done > 0:
                left_s = (monotonic() - started_s) * (len(wanted) - done) / done
                line.show(
                    Progress(
                        stage="timing the parts",
                        done=done,
                        total=len(wanted),
                        best_ratio=None,
                        remaining_s=left_s,
                    )
                )
            traffic = traffic_of(
                asked.problem,
                asked.candidate,
                asked.server,
                threads=threads,
                m=asked.rows,
                regime=regime,
            )
            part_ns = (
                timer.times_ns(threads, traffic.turns, regime)
                if timer
                else predicted_part_ns(traffic)
            )
            calls[regime].append(simulated(traffic, part_ns))
    return [
        Curve(
            regime=regime,
            one_thread_ns=found[0].time_ns,
            calls=tuple(one for one in found if one.threads in counts),
        )
        for regime, found in calls.items()
    ]


def _print_ranking(
    problem: Problem,
    server: Server,
    *,
    threads: int,
    rows: int,
    regimes: Sequence[Regime],
    count: int,
    as_json: bool,
) -> None:
    if count < 1:
        raise InvalidSetting(f"--rank {count} is out of range; use at least 1.")
    candidates = Space(problem=problem, cpu=server.cpu).defaults()
    rankings = {
        regime: ranked_for_threads(
            candidates, problem, server, threads=threads, m=rows, regime=regime
        )
        for regime in regimes
    }
    if as_json:
        print_json(ranking_facts(problem, rows, server, rankings, count))
        return
    print_ranking(problem, rows, server, rankings, count)
