"""How the command line prints: results to stdout, progress and messages to stderr.

Rich is loaded where something is drawn: a plain line needs none of it.
"""

import codecs
import json
import sys
from collections.abc import Sequence
from functools import cache
from io import StringIO, TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO

from gemm_tuner.domain.printable import LINE_BREAK, UNSEEN, harmless

if TYPE_CHECKING:
    from rich.console import Console

# Columns; a pipe has no width.
_UNBOUNDED = 100_000
_GAP = 3  # between columns
_FOLDED = 8  # words are not folded into less

# How ASCII spells what the commands print; anything else is spelled by its number.
_IN_ASCII = {"µ": "u", "\xd7": "x", "…": "...", "≥": ">=", "≤": "<=", "±": "+-", "\u2013": "-"}


def make_printable(stream: TextIO | None) -> None:
    r"""Let a stream spell what its encoding lacks: `u` for `µ`, else `\\u4f60` for a character."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors=_SPELLED)


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    spelled = (
        _IN_ASCII.get(one) or one.encode("ascii", "backslashreplace").decode() for one in missing
    )
    return "".join(spelled), error.end


_SPELLED = "gemm_tuner.spelled"
codecs.register_error(_SPELLED, _spell)


# JSON leaves these as they are, and a terminal obeys some.
_IN_JSON = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)} | UNSEEN


@cache
def results() -> "Console":
    """Return the console of stdout."""
    return _console(on_stderr=False)


@cache
def messages() -> "Console":
    """Return the console of stderr, where progress is drawn."""
    return _console(on_stderr=True)


def _console(*, on_stderr: bool) -> "Console":
    from rich.console import Console  # noqa: PLC0415 - see above

    # A clamp:100:200 is not an emoji.
    return Console(stderr=on_stderr, highlight=False, soft_wrap=True, emoji=False)


def print_line(text: str) -> None:
    """Print a line of the result."""
    sys.stdout.write(f"{harmless(text)}\n")
    sys.stdout.flush()


def print_message(text: str) -> None:
    """Print a line that is not part of the result."""
    messages().print(harmless(text), markup=False)


def print_json(facts: Any) -> None:  # noqa: ANN401 - JSON values have no narrower type
    """Print the result as JSON."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    sys.stdout.write(
        json.dumps(facts, indent=2, ensure_ascii=not is_unicode).translate(_IN_JSON) + "\n"
    )


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; a column whose name starts with `>` is aligned to the right.

    A terminal folds words into its width, if the figures leave room for them. Elsewhere no line is
    folded or cut, however long.
    """
    from rich.console import Console  # noqa: PLC0415 - see above
    from rich.padding import Padding  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in columns:
        is_figure = column.startswith(">")
        table.add_column(
            Text(column.lstrip(">")),
            justify="right" if is_figure else "left",
            no_wrap=is_figure,
            overflow="ellipsis" if is_figure else "fold",
        )
    for row in rows:
        table.add_row(*(Text(harmless(cell).translate(LINE_BREAK)) for cell in row))
    drawn = StringIO()
    paper = Console(
        file=drawn,
        width=results().width if _has_room(columns, rows) else _UNBOUNDED,
        force_terminal=results().is_terminal,
        highlight=False,
        emoji=False,
    )
    paper.print(Padding(table, (0, 0, 0, 2), expand=False))
    print_line(title)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in drawn.getvalue().split("\n")[:-1])


def _has_room(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the output is a terminal as wide as no figure need be cut."""
    if not results().is_terminal:
        return False
    needed = 2 + _GAP * (len(columns) - 1)
    for column, *cells in zip(columns, *rows, strict=True):
        longest = max(map(len, (column.lstrip(">"), *cells)))
        needed += longest if column.startswith(">") else min(longest, _FOLDED)
    return needed <= results().width
