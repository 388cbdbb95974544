"""`gemm-tuner bench-models`: whole models, beside what a user would pick instead."""

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer

from gemm_tuner.cli.arguments import options
from gemm_tuner.cli.arguments.places import check_place
from gemm_tuner.cli.reports.bench_models_report import facts_of, print_runs
from gemm_tuner.cli.reports.models_page import check_page, write_page
from gemm_tuner.cli.terminal.measuring import measuring
from gemm_tuner.cli.terminal.output import print_json, print_message
from gemm_tuner.cli.terminal.progress_line import ProgressLine
from gemm_tuner.domain.model_run import ModelCase, ModelRun
from gemm_tuner.domain.units import counted
from gemm_tuner.errors import InvalidSetting, MissingCapability
from gemm_tuner.machine.cpus import check_cpus
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.models.measure import OnStep, Plan, measure_case
from gemm_tuner.models.results import Results, standing
from gemm_tuner.models.row import Precision
from gemm_tuner.models.table import MODELS, PRECISIONS, WAYS
from gemm_tuner.store.sql.database import default_database_url, open_database
from gemm_tuner.tuning.progress import Progress

_NUMBER = re.compile(r"0{0,9}[1-9][0-9]{0,8}")

# fmt: off
_Models = Annotated[
    list[str] | None, typer.Argument(metavar="[MODEL]...", help="By default all of: "
                                     f"{', '.join(MODELS)}")]
_DTypes = Annotated[
    str, typer.Option("--dtype", help=f"One or several of: {', '.join(PRECISIONS)}")]
_Threads = Annotated[
    str, typer.Option("--threads", help="Threads of a call, or several numbers, as 1,2")]
_Batch = Annotated[int, typer.Option("--batch", min=1, help="Texts or pictures of a call")]
_Rounds = Annotated[
    int, typer.Option("--rounds", min=2, help="Rounds, in each of which all ways have a turn")]
_Budget = Annotated[
    str, typer.Option("--budget", help="Time to tune a layer that the database lacks; 0: none")]
_Ways = Annotated[
    str | None, typer.Option("--ways", help=f"By default all of: {', '.join(WAYS)}")]
_Deadline = Annotated[
    str, typer.Option("--deadline", help="Longest time to prepare a way, and for a round of it")]
_Out = Annotated[
    Path, typer.Option("--out", metavar="FILE.json", help="Results; what is in it is not measured "
                       "again")]
_Markdown = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE.md", help="Also write a page, and a plot "
                              "beside it")]
_Small = Annotated[
    bool, typer.Option("--small", help="A layer or two of few weights, to see that ways work: such "
                       "times mean nothing")]
# fmt: on


def bench_models(
    models: _Models = None,
    *,
    dtype: _DTypes = "f32",
    threads: _Threads = "1",
    batch: _Batch = 1,
    rounds: _Rounds = 9,
    budget: _Budget = "8s",
    ways: _Ways = None,
    deadline: _Deadline = "20m",
    small: _Small = False,
    again: options.Again = False,
    db: options.DatabaseUrl = None,
    out: _Out = Path("gemm-tuner-models.json"),
    markdown: _Markdown = None,
    as_json: options.AsJson = False,
) -> None:
    """Time whole models beside torch.compile, zentorch, OpenVINO and ONNX Runtime.

    Weights are random, and nothing is downloaded. Ctrl-C keeps what is finished; the same command
    goes on with what is missing, and with what failed for a reason that may have passed. The exit
    code is 1 if it was stopped, or if no way of a case is a result.
    """
    cases = [
        ModelCase(model=model, dtype=of_type, threads=count, batch=batch, is_small=small)
        for model, of_type, count in product(
            _known("model", models or list(MODELS), MODELS),
            _known("dtype", dtype.split(","), PRECISIONS),
            _numbers(threads),
        )
    ]
    asked = _known("way", ways.split(",") if ways else list(WAYS), WAYS)
    budget_s = options.parse_duration_or_none_s(budget)
    deadline_s = options.parse_duration_s(deadline)
    check_place(out, databases=[db])
    results = Results(out)
    results.check()
    if markdown is not None:
        check_page(markdown, beside=out, db=db)
    _check_packages(PRECISIONS[one] for one in dtype.split(","))
    url = db or default_database_url()
    open_database(url).dispose()
    plan = Plan(
        ways=tuple(WAYS[name] for name in asked),
        rounds=rounds,
        budget_s=budget_s,
        deadline_s=deadline_s,
        db=url,
        cpu=detect_cpu(),
    )
    is_complete = _measure(cases, plan, results, is_again=again)
    runs = [run for case in cases if (run := standing(results.runs(), case, plan)) is not None]
    if as_json:
        print_json(facts_of(runs))
    elif runs:
        print_runs(runs)
    if markdown is not None and runs:
        write_page(markdown, runs)
    if not is_complete or not all(run.has_result for run in runs):
        raise typer.Exit(1)


def _measure(cases: Sequence[ModelCase], plan: Plan, results: Results, *, is_again: bool) -> bool:
    """Measure what is missing, and return whether nothing is any more."""

    def known() -> dict[ModelCase, ModelRun | None]:
        runs = () if is_again else results.runs()
        return {case: standing(runs, case, plan) for case in cases}

    try:
        if _left(known()):
            with measuring():
                found = known()  # another process may have measured, while this one waited
                _tell_known(found)
                _measure_all(_left(found), plan, results)
        else:
            _tell_known(known())
    except KeyboardInterrupt:
        how = "the same command without --again" if is_again else "the same command"
        print_message(f"Stopped; what was finished is kept, and {how} goes on.")
        return False
    return True


def _left(known: Mapping[ModelCase, ModelRun | None]) -> list[ModelCase]:
    """Return the cases that are to be measured."""
    return [case for case, run in known.items() if run is None or not run.is_settled]


def _tell_known(known: Mapping[ModelCase, ModelRun | None]) -> None:
    settled = len(known) - len(_left(known))
    failed = sum(run is not None for run in known.values()) - settled
    if settled:
        print_message(
            f"{counted(settled, 'case')} of {len(known)} measured before; --again measures anew."
        )
    if failed:
        are = "is" if failed == 1 else "are"
        print_message(
            f"{counted(failed, 'case')} {are} measured again: ways failed by what may have passed, "
            "such as short memory; --ways leaves them out."
        )


def _measure_all(cases: Sequence[ModelCase], plan: Plan, results: Results) -> None:
    pace = _Pace(cases=len(cases), case_s=plan.case_s)
    for place, case in enumerate(cases):
        with ProgressLine(case.text, later_s=0.0) as line:
            run = measure_case(case, plan, pace.shown_by(line, place))
        _tell(run)  # first: it may be that it cannot be kept
        results.add(run)


class _Pace:
    """How far all cases are, in the seconds that their steps were expected to take."""

    def __init__(self, *, cases: int, case_s: float) -> None:
        self._begin_s, self._case_s, self._whole_s = monotonic(), case_s, cases * case_s

    def shown_by(self, line: ProgressLine, place: int) -> OnStep:
        """Return what shows the steps of the case with this place."""
        done_s = place * self._case_s

        def show(stage: str, expected_s: float) -> None:
            nonlocal done_s
            spent_s = monotonic() - self._begin_s
            factor = spent_s / done_s if done_s else 1.0
            line.show(
                Progress(
                    stage=stage,
                    done=round(100 * done_s / self._whole_s),
                    total=100,
                    best_ratio=None,
                    remaining_s=factor * (self._whole_s - done_s),
                )
            )
            done_s += expected_s

        return show


def _tell(run: ModelRun) -> None:
    """Say what was found, and which ways are no result."""
    for one in run.ways:
        for text in (*one.notes, one.reason):
            if text:
                print_message(f"{run.case.text}: {one.way}: {text}")
    if run.ratio is not None and run.rival is not None and run.ours is not None:
        print_message(
            f"{run.case.text}: {run.ours.way} is {run.ratio.median:.3f} times as fast as "
            f"{run.rival.way}."
        )


def _known(what: str, names: Sequence[str], rows: object) -> list[str]:
    assert isinstance(rows, dict)
    for name in names:
        if name not in rows:
            raise InvalidSetting(f"{what} {name!r} is not known; use some of: {', '.join(rows)}.")
    return list(dict.fromkeys(names))


def _numbers(text: str) -> list[int]:
    """Return numbers of threads.

    Raises:
        InvalidSetting: the text is something else.
        NotEnoughCpus: this process may not use so many CPUs.
    """
    words = text.split(",")
    if not all(_NUMBER.fullmatch(word) for word in words):
        told = text[:40]
        raise InvalidSetting(f"threads {told!r} are not understood; write them as '1' or '1,2'.")
    for word in words:
        check_cpus(int(word))
    return list(dict.fromkeys(map(int, words)))


def _check_packages(precisions: Iterable[Precision]) -> None:
    """Check that models can be built, and converted.

    Raises:
        MissingCapability: PyTorch, transformers or what converts them is not installed.
    """
    needed = [
        ("bench-models", package, 'pip install "gemm-tuner[torch,models]"')
        for package in ("torch", "transformers")
    ]
    needed += [(f"--dtype {one.name}", one.needs, one.install) for one in precisions if one.needs]
    for what, package, install in needed:
        if find_spec(package) is None:
            raise MissingCapability(
                f"{what} needs {package}, which is not installed; run: {install}."
            )
