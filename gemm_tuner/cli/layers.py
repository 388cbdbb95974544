"""The layers a command works on: one from its arguments, or many from a CSV file."""

import csv
from dataclasses import dataclass
from pathlib import Path

from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidInput, InvalidSetting

_REQUIRED = ("name", "m", "n", "k")
_OPTIONAL = ("epilogue", "from")
_FAULTS_TOLD = 20
_LONGEST_TOLD = 60

# What csv.DictReader yields; more cells than there are columns come under None.
_Row = dict[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A problem with the name its user knows it by."""

    name: str
    problem: Problem


def layers_of(
    *,
    m: str | None,
    n: int | None,
    k: int | None,
    shapes: Path | None,
    dtype: str,
    epilogue: str,
    w_layout: str,
) -> tuple[Layer, ...]:
    """Return the layers meant by the arguments M N K or by the option `--shapes`.

    M may be several, joined by commas. In a file, an empty or absent epilogue means the one of the
    option `--epilogue`.

    Raises:
        InvalidSetting: both or neither are given, or the file cannot be read.
        InvalidInput: a size, dtype, layout or epilogue cannot be used, or nothing is multiplied.
    """
    if (m is None) == (shapes is None):
        raise InvalidSetting("which layers is not clear; give either M N K or --shapes FILE.")
    if shapes is not None:
        return _read_layers(shapes, dtype=dtype, epilogue=epilogue, w_layout=w_layout)
    if m is None or n is None or k is None:
        raise InvalidSetting(f"sizes {m} {n or ''} are not complete; give M, N and K.")
    problems = [
        Problem.create(rows, n, k, dtype=dtype, w_layout=w_layout, epilogue=epilogue)
        for rows in dict.fromkeys(m.split(","))
    ]
    for problem in problems:
        problem.check_work()
    return tuple(Layer(name=problem.sizes_text, problem=problem) for problem in problems)


def _read_layers(path: Path, *, dtype: str, epilogue: str, w_layout: str) -> tuple[Layer, ...]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidSetting(f"file {path} cannot be read: {error}; give a CSV file.") from None
    missing = [name for name in _REQUIRED if name not in columns]
    if missing:
        raise InvalidSetting(
            f"file {path} has no column {', '.join(missing)}; its first line must name the "
            f"columns {', '.join(_REQUIRED)} and may name epilogue and from."
        )
    unknown = sorted(name for name in columns if name not in {*_REQUIRED, *_OPTIONAL})
    if unknown:
        raise InvalidSetting(
            f"file {path} has the column {', '.join(unknown)}, which is not known; "
            f"rename it to one of {', '.join((*_REQUIRED, *_OPTIONAL))}, or leave it out."
        )
    if not rows:
        raise InvalidSetting(f"file {path} has no layer; add a line below the column names.")
    layers: list[Layer] = []
    faults: list[InvalidInput] = []
    for line, row in rows:
        try:
            layers.append(_layer_of(row, dtype=dtype, epilogue=epilogue, w_layout=w_layout))
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


def _layer_of(row: _Row, *, dtype: str, epilogue: str, w_layout: str) -> Layer:
    if None in row:
        raise InvalidSetting(
            "there are more cells than columns; leave some out, or name more columns."
        )
    problem = Problem.create(
        row["m"] or "",
        _integer("n", row["n"]),
        _integer("k", row["k"]),
        dtype=dtype,
        w_layout=w_layout,
        epilogue=row.get("epilogue") or epilogue,
    )
    problem.check_work()
    # A line break in a name would be one in a table.
    name = " ".join((row["name"] or "").split())
    return Layer(name=name or problem.sizes_text, problem=problem)


def _integer(name: str, text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError:
        shown = repr(text if text is None else text[:_LONGEST_TOLD])
        raise InvalidSetting(f"{name} = {shown} is not a whole number; correct it.") from None
