"""What a page is made of: sections of words, pictures and tables, with nothing of HTML in them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; a column whose name starts with `>` is of figures. It is folded away if so said."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    is_folded: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A picture as SVG, with words above it and the table of its figures below; each may lack."""

    words: tuple[str, ...] = ()
    picture: str = ""
    table: Table | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of a page."""

    title: str
    blocks: tuple[Block, ...]


def evenly(items: Sequence[_Item], most: int) -> list[_Item]:
    """Return at most so many of the items, taken evenly, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(turn * (len(items) - 1) / (most - 1))] for turn in range(most)]


def listed(texts: Iterable[str], most: int = 12) -> str:
    """Return different texts in one line, in the order of their first, no more than `most`."""
    different = [text for text in dict.fromkeys(texts) if text]
    more = f"; and {len(different) - most} more" if len(different) > most else ""
    return ("; ".join(different[:most]) or "not known") + more
