"""Choose baselines that are installed and right; for `auto`, race them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import inf
from pkgutil import iter_modules

from gemm_tuner.bench import baselines
from gemm_tuner.bench.baselines.baseline import Baseline, Copy, Row
from gemm_tuner.bench.baselines.learn import Checked
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.measurement import Raced
from gemm_tuner.errors import BaselineMissing, InvalidSetting, NotEnoughMemory, TrialFailed

AUTO = "auto"

# Libraries whose times in the first heat are within this factor of the least run once more: the
# heats are in processes of their own.
_CLOSE = 1.5
# On one thread the time on a core counts: of 42 layers on a Zen 5, no library took more than 1.16
# times its least in the first of two heats. Long calls hardly differ from process to process.
_CLOSE_ON_ONE_THREAD = 1.25
_CLOSE_OF_LONG_CALLS = 1.1
_LONG_CALL_S = 0.05


@cache
def baseline_rows() -> tuple[Row, ...]:
    """Return the rows of all modules of this package, in their order."""
    modules = (
        import_module(f"{baselines.__name__}.{module.name}")
        for module in iter_modules(baselines.__path__)
    )
    rows = [row for module in modules for row in getattr(module, "ROWS", ())]
    return tuple(sorted(rows, key=lambda row: row.place))


def raced_packages(race_s: float, *, attends: bool = False) -> tuple[str, ...]:
    """Return the packages that a race may be between, if none may take longer to load.

    Those of a race for attention are others.
    """
    return tuple(
        package.text
        for row in baseline_rows()
        if row.is_raced and row.attention_alone is attends
        for package in row.installed()
        if package.start_s <= race_s
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedBaseline:
    """A baseline that is right; `call_s` is the time of one call of it.

    `is_quiet` says that to load it starts no threads.
    """

    name: str
    text: str
    implementation: str
    baseline: Baseline
    call_s: float
    is_quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The baselines to time beside, at least one, and by name why others were left out.

    `raced` are the libraries between which `auto` chose, the fastest first.
    """

    baselines: tuple[CheckedBaseline, ...]
    left_out: dict[str, str]
    raced: tuple[Raced, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """How `auto` is decided in a regime: by an earlier winner, or a race between quick libraries.

    `limit_s` is how long a library may take to load. An earlier race counts where nothing has been
    installed since that could take part. `threads` of calls are 0 if they are not known.
    """

    limit_s: float = inf
    earlier: tuple[Raced, ...] = ()
    threads: int = 0
    regime: Regime = Regime.HOT


Check = Callable[[Baseline], Checked | str]
Find = Callable[[Row], Sequence[Copy]]


def choose_baselines(
    names: Sequence[str], rows: Sequence[Row], find: Find, check: Check, race: Race | None = None
) -> Choice:
    """Return those of the named baselines that are there and right.

    Args:
        names: of rows; `auto` stands for the fastest of those that are raced.
        rows: the libraries.
        find: the installed copies of one, or `BaselineMissing`.
        check: returns the fault in the results of a baseline, or what was learnt of a right one.
        race: how `auto` is decided.

    Raises:
        InvalidSetting: a name is not known.
        BaselineMissing: all are missing or wrong.
    """
    by_name = {row.name: row for row in rows}
    chosen: list[CheckedBaseline] = []
    reasons = _Reasons()
    raced: tuple[Raced, ...] = ()
    for name in names:
        if name == AUTO:
            winner, raced = _run_race(rows, find, check, race or Race(), reasons)
            chosen += [winner] if winner else []
            continue
        if name not in by_name:
            raise InvalidSetting(
                f"baseline {name!r} is not known; use one of: {', '.join((AUTO, *by_name))}."
            )
        entrants = _entrants(by_name[name], find, reasons)
        found = next(filter(None, (_enter(name, one, check, reasons) for one in entrants)), None)
        if found is not None:
            chosen.append(found)
            reasons.forget(name)
    if not chosen:
        raise BaselineMissing(
            f"no baseline can be used: {' '.join(reasons.all.values())} Choose another one."
        )
    for one in chosen:  # and nothing else: libraries have several OpenMP runtimes
        if one.is_quiet:
            one.baseline.preload()
    return Choice(baselines=tuple(chosen), left_out=reasons.all, raced=raced)


class _Reasons:
    """Why libraries are not used: they cannot be, or are faulty, by name."""

    def __init__(self) -> None:
        self._refused: dict[str, str] = {}
        self._faults: dict[str, str] = {}
        self.of_packages: dict[str, str] = {}

    @property
    def all(self) -> dict[str, str]:
        """Return all reasons."""
        return self._refused | self._faults

    def refuse(self, name: str, reason: str, *, package: str = "") -> None:
        """Note that a library is not installed, or does not compute such a problem."""
        self._refused.setdefault(name, reason)
        self.of_packages.setdefault(package, reason)

    def find_fault(self, name: str, reason: str, *, package: str) -> None:
        """Note that a library crashed, or computes something else."""
        self._faults.setdefault(name, f"{package}: {reason}")
        self.of_packages.setdefault(package, reason)

    def forget(self, name: str) -> None:
        """Forget why copies of a library cannot be used: another can."""
        self._refused.pop(name, None)

    def forget_refusals(self, kept: str) -> None:
        """Forget why libraries cannot be used that nobody asked for, but for one."""
        self._refused = {name: text for name, text in self._refused.items() if name == kept}


def _run_race(
    rows: Sequence[Row], find: Find, check: Check, race: Race, reasons: _Reasons
) -> tuple[CheckedBaseline | None, tuple[Raced, ...]]:
    """Return the fastest of the libraries that are raced, or else the first that is a last resort.

    The winner of an earlier race need only be right, however long it takes to start.
    """
    installed = [
        (row.name, copy) for row in rows if row.is_raced for copy in _entrants(row, find, reasons)
    ]
    entrants = [one for one in installed if one[1].start_s <= race.limit_s]
    if remembered := _winner_of(race.earlier, entrants, installed):
        found = _enter(*remembered, check, reasons)
        if found is not None:
            reasons.forget_refusals(_expected(rows))
            return found, race.earlier
    finished = _heats(entrants, check, reasons, threads=race.threads)
    if finished:
        for _package, found in finished:
            reasons.forget(found.name)
        reasons.forget_refusals(_expected(rows))
        standings = _standings(finished, entrants, reasons.of_packages, race.regime)
        return finished[0][1], (*standings, *_late_ones(installed, race))
    for row in rows:
        for copy in _entrants(row, find, reasons) if row.is_last_resort else ():
            if found := _enter(row.name, copy, check, reasons):
                return found, ()
    return None, ()


def _expected(rows: Sequence[Row]) -> str:
    """Return the library of which users are told that it does not take part; they expect it."""
    return next(row.name for row in rows if row.is_raced)


def _heats(
    entrants: Sequence[tuple[str, Copy]], check: Check, reasons: _Reasons, *, threads: int
) -> list[tuple[str, CheckedBaseline]]:
    """Return the packages whose baseline is right with it, the fastest first.

    Each runs in a process of its own; those that are close run twice.
    """
    best: dict[str, CheckedBaseline] = {}
    for name, copy in entrants:
        if found := _enter(name, copy, check, reasons):
            best[copy.package] = found
    close = _close_ones({package: found.call_s for package, found in best.items()}, threads)
    for name, copy in entrants:
        again = _enter(name, copy, check, reasons) if copy.package in close else None
        if again is not None and again.call_s < best[copy.package].call_s:
            best[copy.package] = again
    return sorted(best.items(), key=lambda item: item[1].call_s)


def _standings(
    finished: Sequence[tuple[str, CheckedBaseline]],
    entrants: Sequence[tuple[str, Copy]],
    reasons: Mapping[str, str],
    regime: Regime,
) -> tuple[Raced, ...]:
    """Return who took part: the fastest first, last those that could not be used, and why."""
    ranked = [
        Raced(package=package, baseline=found.text, call_ns=1e9 * found.call_s, regime=regime)
        for package, found in finished
    ]
    packages = {package for package, _found in finished}
    others = [copy.package for _name, copy in entrants if copy.package not in packages]
    refused = [
        Raced(
            package=package,
            baseline="",
            call_ns=0.0,
            reason=reasons.get(package, ""),
            regime=regime,
        )
        for package in others
    ]
    return (*ranked, *refused)


def _late_ones(installed: Sequence[tuple[str, Copy]], race: Race) -> tuple[Raced, ...]:
    """Return the libraries that take longer to start than the race may last."""
    return tuple(
        Raced(
            package=copy.package,
            baseline="",
            call_ns=0.0,
            reason=f"takes up to {copy.start_s:.3g} s to start, and the race of this budget has"
            f" {race.limit_s:.2g} s; give a longer --budget",
            regime=race.regime,
            lacked_time=True,
        )
        for _name, copy in installed
        if copy.start_s > race.limit_s
    )


def _winner_of(
    earlier: Sequence[Raced],
    entrants: Sequence[tuple[str, Copy]],
    installed: Sequence[tuple[str, Copy]],
) -> tuple[str, Copy] | None:
    """Return who won an earlier race, if all that could take part today took part in it."""
    took_part = {one.package for one in earlier if not one.lacked_time}
    if not earlier or not {copy.package for _name, copy in entrants} <= took_part:
        return None
    return next((one for one in installed if one[1].package == earlier[0].package), None)


def _close_ones(times_s: Mapping[str, float], threads: int) -> list[str]:
    """Return those whose time is close to the least, if there are several."""
    least = min(times_s.values(), default=0.0)
    factor = _CLOSE
    if threads == 1:
        factor = _CLOSE_OF_LONG_CALLS if least >= _LONG_CALL_S else _CLOSE_ON_ONE_THREAD
    close = [key for key, time_s in times_s.items() if time_s <= factor * least]
    return close if len(close) > 1 else []


def _entrants(row: Row, find: Find, reasons: _Reasons) -> Sequence[Copy]:
    try:
        return find(row)
    except (BaselineMissing, NotEnoughMemory, TrialFailed) as refusal:
        reasons.refuse(row.name, str(refusal))
        return ()


def _enter(name: str, copy: Copy, check: Check, reasons: _Reasons) -> CheckedBaseline | None:
    """Return the baseline if it is right; otherwise note why it cannot be used."""
    baseline = copy.baseline
    try:
        checked = check(baseline)
    except BaselineMissing as refusal:
        reasons.refuse(name, str(refusal), package=copy.package)
        return None
    except (NotEnoughMemory, TrialFailed) as failure:
        checked = str(failure)
    if isinstance(checked, str):
        reasons.find_fault(name, checked, package=copy.package)
        return None
    baseline.settle(checked.choice)
    return CheckedBaseline(
        name=name,
        text=checked.text,
        implementation=checked.implementation,
        baseline=baseline,
        call_s=checked.call_s,
        is_quiet=checked.is_quiet,
    )
