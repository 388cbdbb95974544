"""The axes of the space: one file for one axis, in the order of their fields in `Blocking`.

A file says what the axis decides, what is worth trying and what is tried first, and ends with its
row, `AXIS`. Files in this folder are found by themselves. The order is that of the words in the
text of a candidate and of the moves of a search.
"""

from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules

from gemm_tuner.domain.blocking import Blocking
from gemm_tuner.space.axis import Axis

_FIELDS = [field.name for field in fields(Blocking)]


def _rows() -> Iterator[Axis]:
    for module in iter_modules(__path__, f"{__name__}."):
        axis = import_module(module.name).AXIS
        assert isinstance(axis, Axis)
        yield axis


AXES = tuple(sorted(_rows(), key=lambda axis: _FIELDS.index(axis.fields[0])))
