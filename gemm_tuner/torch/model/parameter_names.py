"""The names of a model's parameters, known by the memory that a tensor shows."""

from collections.abc import Iterator
from typing import Any
from weakref import ReferenceType, ref

from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class ParameterNames:
    """The names of parameters, by where they lie; a parameter that is gone has none."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ReferenceType[Any], str]] = {}

    def add(self, parameter: Any, name: str) -> None:  # noqa: ANN401 - of PyTorch
        """Let a parameter have a name, or the tensors that one of a subclass is made of."""
        for part in _parts(parameter):
            address = address_of(part)
            if address is not None:
                self._known[address] = ref(part), name

    def of(self, tensor: Any) -> str | None:  # noqa: ANN401 - of PyTorch
        """Return the name of the parameter that a tensor shows, None if it shows none."""
        address = address_of(tensor)
        found = None if address is None else self._known.get(address)
        if found is None:
            return None
        parameter = found[0]()
        return found[1] if parameter is not None and address_of(parameter) == address else None


def _parts(tensor: Any) -> Iterator[Any]:  # noqa: ANN401 - a tensor
    """Yield the tensors that a wrapper is made of, such as bytes and their scales; or itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _context = tensor.__tensor_flatten__()
    for name in names:
        yield from _parts(getattr(tensor, name))


def address_of(tensor: Any) -> int | None:  # noqa: ANN401 - a tensor
    """Return where the memory of a tensor begins, None if it has none that it tells of."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except Exception:  # noqa: BLE001 - each kind of tensor without storage has its own
        return None
