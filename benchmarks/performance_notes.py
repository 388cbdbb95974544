"""Why a library is faster than our kernel: what a person found out, held against what was measured.

The file has a note for each such layer, by section and layer, such as "f32 hot cube_2048": which
library is meant ("beside") and the reason ("why").
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench_rows import Row, best_of, is_behind, key_of, library_of, section_of

NO_DIFFERENCE = "no difference: the 95 % interval holds 1"
UNKNOWN = "not known"


@dataclass(frozen=True, kw_only=True)
class Notes:
    """The reasons that fit what was measured, by section and layer, and what does not fit."""

    whys: Mapping[str, str]
    misfits: tuple[str, ...]

    def why(self, row: Row) -> str:
        """Return the reason why a library is faster, or nothing where none is."""
        return self.whys.get(key_of(row), "")


def read_notes(path: Path, rows: Iterable[Row]) -> Notes:
    """Return the notes of a file, which may be missing, on `rows`.

    A note that no longer fits is left out, and is among the misfits with what to do.
    """
    texts: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}
    whys: dict[str, str] = {}
    misfits: list[str] = []
    sections: set[str] = set()
    keys: set[str] = set()
    for row in rows:
        key = key_of(row)
        sections.add(section_of(row))
        keys.add(key)
        why, misfit = _judge(row, texts.get(key))
        if why:
            whys[key] = why
        if misfit:
            misfits.append(f"{key}: {misfit}")
    misfits += [
        f"{key}: this layer was not measured, remove the note."
        for key in texts
        if key not in keys and key.rsplit(" ", 1)[0] in sections
    ]
    return Notes(whys=whys, misfits=tuple(misfits))


def _judge(row: Row, note: Mapping[str, str] | None) -> tuple[str, str]:
    """Return why a library is faster, and what is wrong with the note; nothing where nothing is."""
    best = best_of(row)
    if best is None and row["doubted"]:
        return "", ""
    if best is None or best["ratio"]["median"] >= 1:
        return "", "no baseline is faster, remove the note." if note else ""
    library = library_of(best["baseline"])
    if note is not None and note["beside"] == library:
        return note["why"], ""
    misfit = f"written for {note['beside']}, but {library} is fastest." if note else ""
    if not is_behind(row):
        return NO_DIFFERENCE, misfit
    return UNKNOWN, misfit or f"{library} is faster, and no note says why."
