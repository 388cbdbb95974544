"""Layers that call tuned kernels let go of the weights that they have packed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gemm_tuner.domain.printable import quoted
from gemm_tuner.domain.units import bytes_text, counted
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.torch.calls import compiled_in
from gemm_tuner.torch.eager.integer_weights import is_of_torchao
from gemm_tuner.torch.eager.packed_linear import free_layer
from gemm_tuner.torch.eager.tuned_linear import TunedModule

_COMPILED = "it is in a module that torch.compile has compiled, which calls no kernel of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """What a model let go of: names of layers and bytes of weights, beside the packed ones.

    `left` says why the other layers that call tuned kernels keep theirs.
    """

    layers: tuple[str, ...]
    weight_bytes: int
    packed_bytes: int
    left: Mapping[str, str]

    def __str__(self) -> str:
        """Return a line on what was freed, and one for each layer that was not."""
        head = (
            f"freed {bytes_text(self.weight_bytes)} of weights of "
            f"{counted(len(self.layers), 'layer')}, which hold "
            f"{bytes_text(self.packed_bytes)} packed"
        )
        return "\n".join([head, *(f"{quoted(one)}: kept: {why}" for one, why in self.left.items())])


def free_weights(model: Any) -> Freed:  # noqa: ANN401 - a module
    """Let the layers that call tuned kernels hold their weights in packed form alone.

    It is for inference in eager mode, after `replace` or `tune_model`: the model takes as much
    memory as before them. Numbers of rows that no kernel is for are computed by kernels too, in
    pieces. `state_dict` has all weights as they were. What may change weights has them first, and
    then keeps them: `load_state_dict`, `to`, copies, `restore`, and what tunes or measures a model.
    Weights that others hold too, such as tied ones, are kept.

    Args:
        model: a `torch.nn.Module`, changed in place.

    Raises:
        InvalidSetting: it is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidSetting(
            f"the model is of type {type(model).__name__}; give a torch.nn.Module, whose layers "
            "call tuned kernels."
        )
    holders, compiled = _holders(model), compiled_in(model)
    freed: list[tuple[str, int, int]] = []
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, TunedModule):
            continue
        weight = module._parameters.get("weight")  # noqa: SLF001 - as TunedModule reads it
        if id(module) in compiled:
            left[name] = _COMPILED
            continue
        why = _why_kept(weight, holders) or free_layer(module)
        if why is None:
            freed.append((name, weight.nbytes, _packed_bytes(module)))
        else:
            left[name] = why
    return Freed(
        layers=tuple(name for name, _weight, _packed in freed),
        weight_bytes=sum(size for _name, size, _packed in freed),
        packed_bytes=sum(size for _name, _weight, size in freed),
        left=left,
    )


def _holders(model: Any) -> dict[int, int]:  # noqa: ANN401 - a module
    """Return how many arrays of a model lie in each memory."""
    found: dict[int, int] = {}
    for module in model.modules():
        for one in (*module._parameters.values(), *module._buffers.values()):  # noqa: SLF001
            memory = _memory(one)
            if memory is not None:
                found[memory] = found.get(memory, 0) + 1
    return found


def _memory(tensor: Any) -> int | None:  # noqa: ANN401 - a tensor or None
    try:
        return None if tensor is None else int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # of no memory
        return None


def _why_kept(weight: Any, holders: Mapping[int, int]) -> str | None:  # noqa: ANN401 - a tensor
    if is_of_torchao(weight):
        return "its weights are integers, which torchao holds"
    memory = _memory(weight)
    if memory is None:
        return "its weights are computed from others, or have no memory"
    if holders[memory] > 1:
        return "its weights are shared with another layer"
    if weight.untyped_storage().nbytes() != weight.nbytes:
        return "its weights are a part of a larger array"
    return None


def _packed_bytes(module: Any) -> int:  # noqa: ANN401 - a module
    size: int = module._held.packed.nbytes  # noqa: SLF001 - of this package
    return size
