"""The conditions of use that belong to a verdict's key."""

from dataclasses import dataclass
from enum import StrEnum
from operator import index

from gemm_tuner.errors import InvalidSetting

MAX_THREADS = 1024


class Regime(StrEnum):
    """What is in the caches when a kernel is called."""

    HOT = "hot"  # the same buffers again and again
    COLD_WEIGHTS = "cold_weights"  # weights come from memory, activations are warm

    @classmethod
    def parse_choice(cls, text: str) -> tuple["Regime", ...]:
        """Return the regimes meant by `hot`, `cold_weights` or `both`.

        Raises:
            InvalidSetting: `text` is none of them.
        """
        if text == "both":
            return tuple(cls)
        try:
            return (cls(text),)
        except ValueError:
            raise InvalidSetting(
                f"regime {text!r} is not known; use 'hot', 'cold_weights' or 'both'."
            ) from None

    @classmethod
    def parse_one(cls, text: str) -> "Regime":
        """Return the regime meant by `hot` or `cold_weights`.

        Raises:
            InvalidSetting: `text` is neither.
        """
        regimes = cls.parse_choice(text)
        if len(regimes) != 1:
            raise InvalidSetting(f"regime {text!r} names two; use 'hot' or 'cold_weights' here.")
        return regimes[0]


def check_threads(threads: int, name: str = "threads") -> int:
    """Return a number of threads, or of parts, as it was given, once it is known to be usable.

    Raises:
        InvalidSetting: it is not a whole number from 1 to MAX_THREADS.
    """
    try:
        number = index(threads)
    except TypeError:
        number = 0
    if not 1 <= number <= MAX_THREADS:
        raise InvalidSetting(f"{name} = {threads!r} is out of range; use 1 to {MAX_THREADS}.")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionContext:
    """How many threads call a kernel, and in which cache regime."""

    threads: int = 1
    regime: Regime = Regime.HOT

    def __post_init__(self) -> None:
        """Check the number of threads."""
        check_threads(self.threads)
