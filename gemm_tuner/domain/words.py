"""The words of a text: how the fields of a noun are said in it, and read back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

Value = int | str  # a flag is an integer, a choice of names a string


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word: the fields that it says, how they are written, and what reads each of them.

    `pattern` has a group named after each field. With the values `unsaid`, there is no word.
    """

    fields: tuple[str, ...]
    pattern: str
    write: Callable[[Sequence[Value]], str]
    read: Callable[[str], Value]
    unsaid: tuple[Value, ...] | None = None

    def text(self, noun: object) -> str | None:
        """Return the word for a noun, or None if it is left out."""
        values = tuple(getattr(noun, field) for field in self.fields)
        return None if values == self.unsaid else self.write(values)


def flag(field: str, word: str | None = None) -> Word:
    """Return the word that stands where a field is true: `pack_x`."""
    said = word or field
    return Word(
        fields=(field,),
        pattern=f"(?P<{field}>{said})",
        write=lambda _values: said,
        read=bool,
        unsaid=(False,),
    )


def number(field: str, prefix: str, *, unsaid: int) -> Word:
    """Return the word of a number behind a prefix: `pf4096`."""
    return Word(
        fields=(field,),
        pattern=rf"{prefix}(?P<{field}>\d+)",
        write=lambda values: f"{prefix}{values[0]}",
        read=int,
        unsaid=(unsaid,),
    )


def one_of(field: str, values: type[StrEnum]) -> Word:
    """Return the word of a choice, which is always said: `jc_ic_jr_ir`."""
    return Word(
        fields=(field,),
        pattern=f"(?P<{field}>{'|'.join(values)})",
        write=lambda chosen: str(chosen[0]),
        read=values,
    )


def sizes(*fields: str) -> Word:
    """Return the word of several numbers, which is always said: `mc128_nc768_kc256`."""
    return Word(
        fields=fields,
        pattern="_".join(rf"{field}(?P<{field}>\d+)" for field in fields),
        write=lambda values: "_".join(
            f"{field}{value}" for field, value in zip(fields, values, strict=True)
        ),
        read=int,
    )


def grid(rows: str, columns: str, depth: str) -> Word:
    """Return the word of a number of parts: `grid1x2`, or `grid1x1x2` where the depth is cut."""
    return Word(
        fields=(rows, columns, depth),
        pattern=rf"grid(?P<{rows}>\d+)x(?P<{columns}>\d+)(?:x(?P<{depth}>\d+))?",
        write=lambda ways: "grid" + "x".join(map(str, ways if ways[2] != 1 else ways[:2])),
        read=int,
        unsaid=(1, 1, 1),
    )


def pattern_of(words: Sequence[Word]) -> str:
    """Return the pattern of a text in these words, each behind a space but the first."""
    first, *others = words
    return first.pattern + "".join(
        f" {word.pattern}" if word.unsaid is None else f"(?: {word.pattern})?" for word in others
    )


def values_in(words: Sequence[Word], found: Mapping[str, str | None]) -> dict[str, Value]:
    """Return the values of the fields that a text says, from the groups of its pattern."""
    return {
        field: word.read(said)
        for word in words
        for field in word.fields
        if (said := found[field]) is not None
    }
