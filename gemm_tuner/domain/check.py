"""One check of a machine: what was seen, how bad it is, and what to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from gemm_tuner.errors import GemmTunerError

Figure = float | int | str | bool | None


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"  # tuning works and its verdicts stand, but it could do better, or is not known
    PROBLEM = "problem"  # tuning cannot work, or what it measures or serves is not to be trusted


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What came of a check. `advice` is what to do, empty where nothing is to be done.

    `figures` are the same facts for programs, each with its unit in its name.
    """

    name: str
    level: Level
    seen: str
    advice: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)

    @classmethod
    def unknown(cls, name: str, why: str) -> Self:
        """Return what to say where the system does not tell."""
        return cls(name=name, level=Level.NOTE, seen=f"not known: {why}")

    @classmethod
    def of_error(cls, name: str, level: Level, error: GemmTunerError) -> Self:
        """Return what an error says: its message ends with what to do."""
        seen, _semicolon, advice = str(error).rstrip(".").rpartition("; ")
        return cls(name=name, level=level, seen=seen or advice, advice=advice if seen else "")


def worst(*levels: Level) -> Level:
    """Return the worst of some levels, at least `ok`."""
    order = list(Level)
    return max(levels, key=order.index, default=Level.OK)
