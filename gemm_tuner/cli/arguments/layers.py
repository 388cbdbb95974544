"""The layers a command works on: one from its arguments, or many from a CSV file."""

import csv
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.problem import Problem, Reduction
from gemm_tuner.errors import InvalidInput, InvalidSetting
from gemm_tuner.files import read_bounded

_REQUIRED = ("name", "m", "n", "k")
_WORDS = ("dtype", "epilogue", "w_layout", "reduction", "operation")  # besides the sizes
_OPTIONAL = (*_WORDS, "from")
_FAULTS_TOLD = 20
_LONGEST_TOLD = 60

_MAX_FILE_BYTES = 2**24
# A cell of CSV, and the comma behind it.
_CELL = re.compile(r'(?:"(?:[^"]|"")*"|[^",][^,\r\n]*|),')


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A problem with the name its user knows it by.

    Raises:
        InvalidSetting: the name has a control character, which a terminal would obey.
    """

    name: str
    problem: Problem

    def __post_init__(self) -> None:
        if any(unicodedata.category(character) == "Cc" for character in self.name):
            raise InvalidSetting(
                f"the name {self.name[:_LONGEST_TOLD]!r} holds a control character; leave it out."
            )

    def contexts_of(self, contexts: Sequence[ExecutionContext]) -> tuple[ExecutionContext, ...]:
        """Return those of several contexts that the layer can be in, or all if it is none.

        Two activations are both warm: of two regimes, they have one.
        """
        if self.problem.operation.packs_ahead:
            return tuple(contexts)
        warm = tuple(one for one in contexts if one.regime is Regime.HOT)
        return warm or tuple(contexts)


def layers_of(
    *,
    m: str | None,
    n: str | None,
    k: int | None,
    shapes: Path | None,
    dtype: str,
    epilogue: str,
    w_layout: str,
    reduction: str = Reduction.ANY.value,
    operation: str = Operation.LINEAR.value,
) -> tuple[Layer, ...]:
    """Return the layers meant by the arguments M N K or by the option `--shapes`.

    M may be several, joined by commas. In a file, an empty or absent dtype, epilogue, w_layout,
    reduction or operation means the one of the option of this name.

    Raises:
        InvalidSetting: both or neither are given, or the file cannot be read.
        InvalidInput: a size, dtype, layout, epilogue, reduction or operation cannot be used, or
            nothing is multiplied.
    """
    if (m is None) == (shapes is None):
        raise InvalidSetting("which layers is not clear; give either M N K or --shapes FILE.")
    words = {
        "dtype": dtype,
        "epilogue": epilogue,
        "w_layout": w_layout,
        "reduction": reduction,
        "operation": operation,
    }
    if shapes is not None:
        return _read_layers(shapes, words)
    if m is None or n is None or k is None:
        given = " ".join(str(one) for one in (m, n) if one is not None)
        raise InvalidSetting(
            f"sizes {given!r} are not complete; give M, N and K, as in 128 3072 768."
        )
    problems = [Problem.create(rows, n, k, **words) for rows in dict.fromkeys(m.split(","))]
    for problem in problems:
        problem.check_work()
    return tuple(Layer(name=problem.sizes_text, problem=problem) for problem in problems)


def _read_layers(path: Path, words: Mapping[str, str]) -> tuple[Layer, ...]:
    """Return the layers of a file, with those of `words` that a row leaves out."""
    columns, rows = _read_table(path)
    missing = [name for name in _REQUIRED if name not in columns]
    if missing:
        found = ", ".join(columns)[:_LONGEST_TOLD] or "nothing"
        raise InvalidSetting(
            f"file {path} has no column {', '.join(missing)}, but {found!r}; its first line must "
            f"name the columns {', '.join(_REQUIRED)}, with commas between them, and may name "
            f"{', '.join(_OPTIONAL)}."
        )
    unknown = sorted(name for name in columns if name not in {*_REQUIRED, *_OPTIONAL})
    if unknown:
        raise InvalidSetting(
            f"file {path} has the column {', '.join(unknown)}, which is not known; "
            f"rename it to one of {', '.join((*_REQUIRED, *_OPTIONAL))}, or leave it out."
        )
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise InvalidSetting(
            f"file {path} has the column {', '.join(twice)} more than once; keep one of each."
        )
    if not rows:
        raise InvalidSetting(f"file {path} has no layer; add a line below the column names.")
    layers: list[Layer] = []
    faults: list[InvalidInput] = []
    for line, cells in rows:
        try:
            row = _row_of(cells, columns)
            layers.append(_layer_of(row, {name: row.get(name) or words[name] for name in _WORDS}))
        except InvalidInput as error:
            faults.append(type(error)(f"{path}, line {line}: {error}"))
    if len(faults) > 1:
        told = "".join(f"\n  {fault}" for fault in faults[:_FAULTS_TOLD])
        rest = len(faults) - _FAULTS_TOLD
        more = f"\n  and {rest} more" if rest > 0 else ""
        raise InvalidSetting(f"{len(faults)} lines cannot be used; correct them:{told}{more}")
    for fault in faults:
        raise fault
    return tuple(layers)


def _read_table(path: Path) -> tuple[tuple[str, ...], list[tuple[int, list[str]]]]:
    """Return the names of the columns of a CSV file, and its rows, each with its first line."""
    try:
        text = read_bounded(path, _MAX_FILE_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"file {path} cannot be read: {error}; give a CSV file.") from None
    lines = StringIO(text, newline="").readlines()
    reader = csv.reader(lines, strict=True)
    columns: tuple[str, ...] = ()
    rows: list[tuple[int, list[str]]] = []
    first = 1
    try:
        for cells in reader:
            if not columns:
                columns = tuple(cell.strip().lower() for cell in cells)
            elif cells:
                rows.append((first, cells))
            first = reader.line_num + 1
    except csv.Error as error:
        is_open = "unexpected end of data" in str(error)
        fault = "a quote is opened and never closed" if is_open else str(error)
        column = _column_of("".join(lines[first - 1 :]), columns)
        raise InvalidSetting(
            f"file {path}, line {first}, column {column}: {fault}; correct it."
        ) from None
    return columns, rows


def _column_of(text: str, columns: tuple[str, ...]) -> str:
    """Return the column of the first cell of a row that is not as CSV has it."""
    start = place = 0
    while (cell := _CELL.match(text, start)) is not None:
        start = cell.end()
        place += 1
    return columns[place] if place < len(columns) else str(place + 1)


def _row_of(cells: Sequence[str], columns: Sequence[str]) -> dict[str, str]:
    if len(cells) > len(columns):
        raise InvalidSetting(
            "there are more cells than columns; leave some out, or name more columns."
        )
    row = {name: cell.strip() for name, cell in zip(columns, cells, strict=False)}
    missing = [name for name in _REQUIRED if name not in row]
    if missing:
        raise InvalidSetting(
            f"there is no cell for the columns {', '.join(missing)}; add what is missing."
        )
    return row


def _layer_of(row: Mapping[str, str], words: Mapping[str, str]) -> Layer:
    problem = Problem.create(row["m"], row["n"].strip(), _integer("k", row["k"]), **words)
    problem.check_work()
    # A line break in a name would be one in a table.
    name = " ".join(row["name"].split())
    return Layer(name=name or problem.sizes_text, problem=problem)


def _integer(name: str, text: str) -> int:
    try:
        # Python takes 1_000 and digits of other scripts too, which are no number of m.
        return int(text if text.isascii() and "_" not in text else "")
    except ValueError:
        raise InvalidSetting(
            f"{name} = {text[:_LONGEST_TOLD]!r} is not a whole number; correct it."
        ) from None
