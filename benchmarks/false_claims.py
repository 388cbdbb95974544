"""Search for false claims: tune random problems on a disturbed machine, check them on a calm one.

    python benchmarks/false_claims.py [--problems 300] [--seed 1] [--budget 2] [--jobs FILE]
                                      [--phase tune|check|both] [--calm-wait SECONDS]

`tune` draws problems over all types, steps, layouts, groups and one or two threads, and tunes each
for a few seconds while other processes disturb the machine. `check` waits until nothing else runs,
and times each kernel that was called `tuned` again, in a fresh process in alternation with the same
baseline (`gemm-tuner bench`). Both keep each result in the file of jobs as it comes, with the
database beside it, so that the same command goes on after Ctrl-C or an interruption.

In the end it says how many claims were made, how many were refuted (0.98 times the speed of the
baseline or less) and how many are implausible, and lists these. The exit code is 1 if there is one,
and 3 if a claim could not be checked because the machine was not calm.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from disturber import Disturber
from random_problems import draw_problem

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.units import duration_text
from gemm_tuner.domain.verdict import Decision, Verdict
from gemm_tuner.errors import GemmTunerError
from gemm_tuner.machine.cpus import usable_cpus
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.machine.processors import read_processor_times, use_since
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.tuning.settings import SweepSettings
from gemm_tuner.tuning.sweep import sweep

REFUTED_AT = 0.98
FAILED = "failed"
_THREADS = (1, 2)
_TRIES = 3  # to check a claim where the measurement was disturbed
_CHECK_S = 5.0  # a guess, before the first
_TUNE_S = 3.0  # a guess, on top of the budget
_LOOK_S = 0.5
_CALM_LOOKS = 2
_BUSY_AT_MOST = 0.25  # of a core
_STOLEN_AT_MOST = 0.02
STOPPED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a sweep said of one problem: a decision, or why it failed."""

    index: int
    problem: str
    threads: int
    decision: str
    doubt: str | None = None
    baseline: str | None = None
    ratio: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What a calm measurement says of a claim; without a ratio, why there is none."""

    index: int
    ratio: float | None
    low: float | None = None
    high: float | None = None
    doubt: str | None = None

    @property
    def is_refuted(self) -> bool:
        """Say whether the kernel is slower than its baseline."""
        return self.doubt is None and self.ratio is not None and self.ratio <= REFUTED_AT

    @property
    def is_implausible(self) -> bool:
        """Say whether nothing explains the ratio."""
        return self.doubt is not None and self.doubt.startswith("implausible")

    @property
    def is_settled(self) -> bool:
        """Say whether this answers the question."""
        return self.is_implausible or (self.doubt is None and self.ratio is not None)


class Jobs:
    """The file of jobs: the settings, then a line for each claim and each check."""

    def __init__(self, path: Path, settings: dict[str, float]) -> None:
        """Read the file, or begin a new one.

        Raises:
            SystemExit: the file is of other settings.
        """
        self.database = f"sqlite:///{path.resolve().with_suffix('.sqlite3')}"
        self._path = path
        self.claims: dict[int, Claim] = {}
        self.checks: dict[int, Check] = {}
        if not path.exists():
            self._append("settings", settings)
            return
        for line in path.read_text().splitlines():
            [(kind, facts)] = json.loads(line).items()
            if kind == "settings" and facts != settings:
                sys.exit(f"{path} is of other settings: {facts}; give these, or another --jobs.")
            if kind == "claim":
                self.claims[facts["index"]] = Claim(**facts)
            if kind == "check":
                self.checks[facts["index"]] = Check(**facts)

    def add_claim(self, claim: Claim) -> None:
        """Keep a claim."""
        self.claims[claim.index] = claim
        self._append("claim", asdict(claim))

    def add_check(self, check: Check) -> None:
        """Keep a check in the place of an earlier one."""
        self.checks[check.index] = check
        self._append("check", asdict(check))

    @property
    def tuned(self) -> list[Claim]:
        """Return the claims that a kernel is faster than its baseline."""
        return [one for one in self.claims.values() if one.decision == Decision.TUNED.value]

    @property
    def unchecked(self) -> list[Claim]:
        """Return the claims to be checked that no check has settled."""
        settled = {index for index, check in self.checks.items() if check.is_settled}
        return [claim for claim in self.tuned if claim.index not in settled]

    def _append(self, kind: str, facts: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({kind: facts}) + "\n")


class TimeLeft:
    """Tells the progress of tasks that take about as long as those before."""

    def __init__(self, tasks: int, guess_s: float) -> None:
        """Begin with a guess."""
        self._tasks, self._guess_s = tasks, guess_s
        self._done, self._begin_s = 0, time.monotonic()

    def tell(self, text: str) -> None:
        """Report the result of a task, and how long the others will take."""
        self._done += 1
        each_s = (time.monotonic() - self._begin_s) / self._done
        left = duration_text((self._tasks - self._done) * each_s)
        print(f"[{self._done} of {self._tasks}, {left} left] {text}", flush=True)

    @property
    def text(self) -> str:
        """Return how much there is to do."""
        return f"{self._tasks}, about {duration_text(self._tasks * self._guess_s)}"


def draw(seed: int, index: int, cpu: Cpu) -> tuple[Problem, int]:
    """Return problem number `index` of a seed, and its number of threads."""
    dice = Random(f"{seed}:{index}")
    threads = dice.choice([one for one in _THREADS if one <= usable_cpus()])
    return draw_problem(dice, cpu), threads


def tune(jobs: Jobs, *, problems: int, seed: int, budget_s: float) -> None:
    """Tune what was not tuned yet, while others disturb the machine."""
    missing = [index for index in range(problems) if index not in jobs.claims]
    if not missing:
        return
    cpu, repository = detect_cpu(), Repository(open_database(jobs.database))
    settings = SweepSettings(toolchain=find_toolchain(), budget_s=budget_s)
    left = TimeLeft(len(missing), budget_s + _TUNE_S)
    print(f"Problems to tune on a disturbed machine: {left.text}", flush=True)
    with Disturber(seed):
        for index in missing:
            problem, threads = draw(seed, index, cpu)
            try:
                [result] = sweep(
                    problem,
                    contexts=[ExecutionContext(threads=threads)],
                    cpu=cpu,
                    repository=repository,
                    settings=settings,
                    on_progress=lambda _step: None,
                    is_stopped=lambda: False,
                )
                claim = _claim(index, problem, threads, result.verdict)
            except GemmTunerError as error:
                claim = _failure(index, problem, threads, error)
            jobs.add_claim(claim)
            left.tell(_text_of(claim))


def _failure(index: int, problem: Problem, threads: int, error: GemmTunerError) -> Claim:
    return Claim(
        index=index, problem=problem.text, threads=threads, decision=FAILED, error=str(error)
    )


def _claim(index: int, problem: Problem, threads: int, verdict: Verdict) -> Claim:
    measurement = verdict.measurement
    return Claim(
        index=index,
        problem=problem.text,
        threads=threads,
        decision=verdict.decision.value,
        doubt=verdict.doubt,
        baseline=measurement.baseline if measurement else None,
        ratio=measurement.ratio.median if measurement else None,
    )


def check(jobs: Jobs, *, calm_wait_s: float) -> None:
    """Time each claim again on a calm machine; those are left for later that must wait too long."""
    waiting = jobs.unchecked
    if not waiting:
        return
    left = TimeLeft(len(waiting), _CHECK_S)
    print(f"Claims to check on a calm machine: {left.text}", flush=True)
    for claim in waiting:
        found = _check_one(jobs.database, claim, calm_wait_s)
        jobs.add_check(found)
        left.tell(f"{_text_of(claim)}; calm: {found.doubt or f'{found.ratio:.3f}'}")


def _check_one(database: str, claim: Claim, calm_wait_s: float) -> Check:
    """Return the first check that settles a claim, or the last of some."""
    found = Check(index=claim.index, ratio=None, doubt="not checked: the machine was not calm")
    for _try in range(_TRIES):
        if not wait_until_calm(calm_wait_s):
            return found
        found = _bench(database, claim)
        if found.is_settled:
            break
    return found


def _bench(database: str, claim: Claim) -> Check:
    assert claim.baseline is not None
    problem = Problem.parse(claim.problem)
    name = claim.baseline.split()[0]
    # fmt: off
    command = [
        sys.executable, "-m", "gemm_tuner", "bench",
        problem.m.text, str(problem.n), str(problem.k),
        "--dtype", problem.types.text, "--w-layout", problem.layout_text,
        "--epilogue", problem.epilogue.text, "--threads", str(claim.threads),
        "--baseline", name, "--db", database, "--json",
    ]
    # fmt: on
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        [row] = json.loads(ended.stdout)["layers"]
        [beside] = _beside(row["baselines"], claim.baseline)
    except ValueError:
        why = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}"]
        return Check(index=claim.index, ratio=None, doubt=f"not checked: {why[0]}")
    ratio = beside["ratio"]
    return Check(
        index=claim.index,
        ratio=ratio["median"],
        low=ratio["low"],
        high=ratio["high"],
        doubt=beside["doubt"],
    )


def _beside(baselines: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the timing beside the baseline of a claim, or else beside its other version."""
    of_version = [one for one in baselines if one["baseline"] == text]
    name = text.split(maxsplit=1)[0]
    return of_version or [one for one in baselines if one["baseline"].split()[0] == name]


def wait_until_calm(longest_s: float) -> bool:
    """Wait until nothing else runs on the usable cores; return whether that came in time."""
    end_s = time.monotonic() + longest_s
    calm_looks = 0
    while calm_looks < _CALM_LOOKS:
        begin = read_processor_times()
        time.sleep(_LOOK_S)
        use = use_since(begin)
        is_calm = use is None or (
            use.idle >= usable_cpus() - _BUSY_AT_MOST and use.stolen <= _STOLEN_AT_MOST
        )
        calm_looks = calm_looks + 1 if is_calm else 0
        if not is_calm and time.monotonic() > end_s:
            return False
    return True


def report(jobs: Jobs) -> int:
    """Print the claims and their checks; return the exit code."""
    print()
    for line in _report_lines(jobs):
        print(line)
    checks = [jobs.checks[one.index] for one in jobs.tuned if one.index in jobs.checks]
    if any(one.is_refuted or one.is_implausible for one in checks):
        return 1
    return 3 if jobs.unchecked else 0


def _report_lines(jobs: Jobs) -> Iterator[str]:
    claims = jobs.claims.values()
    counts = Counter(_kind(claim) for claim in claims)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    yield f"{len(claims)} problems: {kinds or 'none'}"
    listed = {
        "refuted": [one for one in jobs.tuned if _has(jobs, one, "is_refuted")],
        "implausible": [one for one in jobs.tuned if _has(jobs, one, "is_implausible")],
        "not checked": jobs.unchecked,
    }
    yield f"{len(jobs.tuned)} tuned: " + ", ".join(
        f"{len(found)} {kind}" for kind, found in listed.items()
    )
    for kind, found in listed.items():
        for claim in found:
            made = jobs.checks.get(claim.index)
            said = "" if made is None else f"; calm: {made.ratio} ({made.low} to {made.high})"
            why = f", {made.doubt}" if made and made.doubt else ""
            yield f"  {kind}: {_text_of(claim)}{said}{why}"
    for claim in claims:
        if claim.decision == FAILED:
            yield f"  {FAILED}: {_text_of(claim)}"


def _kind(claim: Claim) -> str:
    """Return the answer of a sweep in one word."""
    if claim.doubt is None:
        return claim.decision
    return "refused" if claim.doubt.startswith("implausible") else "disturbed"


def _has(jobs: Jobs, claim: Claim, what: str) -> bool:
    found = jobs.checks.get(claim.index)
    return found is not None and bool(getattr(found, what))


def _text_of(claim: Claim) -> str:
    threads = f"{claim.threads} thread{'' if claim.threads == 1 else 's'}"
    ratio = "" if claim.ratio is None else f" {claim.ratio:.3f} over {claim.baseline}"
    why = claim.doubt or claim.error
    return f"{claim.problem}, {threads}: {claim.decision}{ratio}{f' ({why})' if why else ''}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--problems", type=int, default=300, help="how many to draw")
    parser.add_argument("--seed", type=int, default=1, help="what they are drawn from")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds to tune each")
    parser.add_argument("--jobs", type=Path, default=Path("false_claims.jsonl"), metavar="FILE")
    parser.add_argument("--phase", choices=("tune", "check", "both"), default="both")
    parser.add_argument(
        "--calm-wait", type=float, default=300.0, help="longest wait for a calm machine, seconds"
    )
    return parser


def main(arguments: argparse.Namespace) -> int:
    """Do the phases that are asked for, and report."""
    jobs = Jobs(arguments.jobs, {"seed": arguments.seed, "budget_s": arguments.budget})
    try:
        if arguments.phase != "check":
            tune(jobs, problems=arguments.problems, seed=arguments.seed, budget_s=arguments.budget)
        if arguments.phase != "tune":
            check(jobs, calm_wait_s=arguments.calm_wait)
    except KeyboardInterrupt:
        print("Stopped; the same command goes on from here.")
        return STOPPED
    return report(jobs)


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
