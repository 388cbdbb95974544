"""A kernel beside the fastest library, and beside the one that runs in its place."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from gemm_tuner.domain.measurement import Library, Raced, Ratio

SERVED_ABOVE = 0.97
SERVED_FROM = 1.0


class InProcess(StrEnum):
    """The libraries that can run in the process of a caller, the preferred one first.

    The values are how their texts begin. `gemm_tuner/libraries/choose.py` has a row for each.
    """

    ONEDNN = "onednn"
    OPENBLAS = "openblas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instead:
    """The library that runs where no kernel is served, and its speed over the baseline's."""

    library: Library
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The speed of a kernel over that of the baseline, and what runs where it is not served.

    `instead` is the baseline itself where that can run in the process of a caller, else the fastest
    such library of its race, and None where there was none. No library stands in for a kernel whose
    order of additions `is_fixed`.
    """

    ratio: Ratio
    baseline: Library
    instead: Instead | None = None
    is_fixed: bool = False

    @classmethod
    def of(
        cls, ratio: Ratio, baseline: str, raced: Sequence[Raced], *, is_fixed: bool = False
    ) -> Self:
        """Return the comparison with a baseline, which won the race between `raced`, if any."""
        library = Library(text=baseline)
        itself = next((one for one in raced if library.is_version_of(one.baseline)), None)
        if itself is not None:
            library = Library(text=baseline, package=itself.package)
        if is_fixed:
            return cls(ratio=ratio, baseline=library, is_fixed=True)
        if _runs_in_process(library):
            return cls(ratio=ratio, baseline=library, instead=Instead(library=library))
        others = [one for one in raced if _runs_in_process(Library(text=one.baseline))]
        if itself is None or not others:
            return cls(ratio=ratio, baseline=library)
        fastest = min(others, key=lambda one: one.call_ns)
        return cls(
            ratio=ratio,
            baseline=library,
            instead=Instead(
                library=Library(text=fastest.baseline, package=fastest.package),
                speed=itself.call_ns / fastest.call_ns,
            ),
        )

    @property
    def other(self) -> Library | None:
        """Return the library that runs instead, if that is another than the baseline."""
        is_other = self.instead is not None and self.instead.library != self.baseline
        return self.instead.library if self.instead and is_other else None

    @property
    def beside_instead(self) -> Ratio:
        """Return the speed over that of what runs instead, or of the baseline if none is known."""
        if self.instead is None:
            return self.ratio
        ratio, speed = self.ratio, self.instead.speed
        return Ratio(
            median=ratio.median / speed,
            low=ratio.low / speed,
            high=ratio.high / speed,
            of_minimums=ratio.of_minimums / speed,
        )

    @property
    def is_servable(self) -> bool:
        """Say whether the kernel is as fast as what runs instead, if anything may."""
        return self.is_fixed or is_as_fast(self.beside_instead)

    def is_behind(self, libraries: Collection[str]) -> bool:
        """Return whether the baseline is one of these, by name, and the kernel not as fast."""
        is_among = self.baseline.name in libraries
        return is_among and not self.is_fixed and not is_as_fast(self.ratio)


def is_as_fast(ratio: Ratio) -> bool:
    """Return whether a kernel with this ratio to what runs instead may be served.

    Its median must not be below that speed, and its interval not below 0.97 of it.
    """
    return ratio.median >= SERVED_FROM and ratio.low >= SERVED_ABOVE


def _runs_in_process(library: Library) -> bool:
    return library.name in set(InProcess)
