"""A source that tunes no longer in all than a program allows."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

from gemm_tuner.domain.printable import value_text
from gemm_tuner.domain.rows import Rows
from gemm_tuner.domain.units import duration_text
from gemm_tuner.errors import InvalidSetting, PreparationStopped
from gemm_tuner.layers.sources import HasSources, Source, seconds_of
from gemm_tuner.layers.wanted import FoundLayer, WantedLayer
from gemm_tuner.machine.forks import tell_of_forks
from gemm_tuner.machine.measuring_lock import waiting_at_most
from gemm_tuner.tuning.ranges.wide_range import budgets_of


def within(source: Source, total_budget_s: object) -> Source:
    """Return a source that tunes for so many seconds in all, or itself where there is no limit.

    Raises:
        InvalidSetting: it is no positive time.
    """
    if total_budget_s is None:
        return source
    total_s = seconds_of(total_budget_s)
    if not total_s > 0:
        raise InvalidSetting(
            f"total_budget_s = {value_text(total_budget_s)} cannot be used; give a positive time, "
            "or None."
        )
    return LimitedSource(source, total_s)


@dataclass(slots=True, weakref_slot=True, eq=False)
class LimitedSource:
    """Another source, which tunes until `total_s` seconds are spent: one layer at a time.

    Waiting for others that measure is part of that time.
    """

    source: Source
    total_s: float
    clock: Callable[[], float] = time.monotonic
    _spent_s: float = field(default=0.0, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    def __post_init__(self) -> None:
        tell_of_forks(self)

    def after_fork(self) -> None:
        """Let the child tune: a thread of the parent may hold the lock."""
        self._lock = Lock()

    @property
    def text(self) -> str | None:
        """Return what opens the source again in another process, without a limit."""
        return self.source.text

    @text.setter
    def text(self, text: str | None) -> None:
        self.source.text = text

    def find(self, wanted: WantedLayer) -> FoundLayer:
        """Return the kernels for a layer, as the source does."""
        return self.source.find(wanted)

    def choices(self, wanted: WantedLayer) -> Sequence[FoundLayer]:
        """Return the ways to compute a layer, as the source does."""
        return self.source.choices(wanted)

    def source_text(self, sha256: str) -> str | None:
        """Return the C++ of a kernel, None if the source keeps none."""
        return self.source.source_text(sha256) if isinstance(self.source, HasSources) else None

    def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:
        """Tune a layer for `budget_s` seconds, or for what is left of the total.

        Raises:
            InvalidSetting: nothing is left, and the source has no answer either.
            GemmTunerError: as in the source.
        """
        with self._lock:
            left_s = self.total_s - self._spent_s
            if left_s <= 0:
                if not self._is_answered(wanted):
                    raise self._over("were over before it")
                return
            begin_s = self.clock()
            try:
                each_s = min(budget_s, left_s / max(1, _budgets(wanted)))
                with waiting_at_most(left_s):
                    self.source.tune(wanted, each_s, is_quiet=is_quiet)
            except PreparationStopped as error:
                raise self._over(f"are over: {str(error).removesuffix('.')}") from error
            finally:
                self._spent_s += self.clock() - begin_s

    def _is_answered(self, wanted: WantedLayer) -> bool:
        """Return whether the source has a kernel for each of the rows, or timed one."""
        each = (self.source.find(replace(wanted, rows=(one,))) for one in wanted.rows)
        return all(found.kernels or found.was_timed for found in each)

    def _over(self, when: str) -> InvalidSetting:
        return InvalidSetting(
            f"the {duration_text(self.total_s)} of total_budget_s {when}; "
            "give more, or run this again, which goes on."
        )


def _budgets(wanted: WantedLayer) -> int:
    """Return how many times the time for one number of rows it takes to tune what is wanted."""
    return sum(budgets_of(Rows.parse(str(rows))) for rows in wanted.rows)
