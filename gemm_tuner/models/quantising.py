"""Models whose weights, or all operands of whose layers, are integers, as torchao makes them."""

from functools import partial
from importlib import import_module
from typing import Any

from gemm_tuner.errors import InvalidSetting
from gemm_tuner.models.row import Built

# Weights of 4 bits along k with one scale: the most that divide it. By default, torchao and NNCF
# have 128. PyTorch's operator packs so many columns at once.
_GROUPS = (128, 64, 32)
_COLUMNS = 16


def with_bytes(built: Built, *, is_folded: bool = True) -> Built:
    """Return a model whose linear layers and convolutions multiply bytes.

    It is quantised after training, by PyTorch's quantiser for Inductor on x86: x in u8 with one
    scale and zero point, known before, and w in s8 with a scale for each channel. What it is called
    with calibrates it. If not `is_folded`, weights are floats that are rounded at each call, to the
    same bytes: packages that read exported programs find both roundings then.
    """
    torch = import_module("torch")
    pt2e: Any = import_module("torchao.quantization.pt2e.quantize_pt2e")
    x86: Any = import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    module = torch.export.export(built.module, (), dict(built.inputs)).module()
    module.graph.eliminate_dead_code()  # the quantiser fails on layers that nothing reads
    module.recompile()
    prepared = pt2e.prepare_pt2e(module, quantizer)
    prepared(**built.inputs)
    return Built(module=pt2e.convert_pt2e(prepared, fold_quantize=is_folded), inputs=built.inputs)


def program_with_bytes(built: Built) -> Any:  # noqa: ANN401 - an exported program
    """Return the same as a program of torch.export."""
    found = with_bytes(built, is_folded=False)
    return import_module("torch").export.export(found.module, (), dict(found.inputs))


def with_weights_of_bytes(built: Built) -> Built:
    """Return a model whose linear layers have weights of s8, with a scale for each channel."""
    quantization: Any = import_module("torchao.quantization")
    quantization.quantize_(built.module, quantization.Int8WeightOnlyConfig())
    return built


def group_of(n: int, k: int) -> int | None:
    """Return how many weights of 4 bits along k have one scale, None where they stay floats."""
    fitting = (group for group in _GROUPS if k % group == 0)
    return None if n % _COLUMNS else next(fitting, None)


def with_weights_of_4_bits(built: Built) -> Built:
    """Return a model whose linear layers have weights of u4, in groups along k with two floats.

    Layers whose sizes PyTorch does not pack stay as they are.

    Raises:
        InvalidSetting: those are all.
    """
    torch = import_module("torch")
    quantization: Any = import_module("torchao.quantization")
    int4: Any = import_module("torchao.prototype.quantization.int4")

    def takes(group: int, module: Any, _name: str) -> bool:  # noqa: ANN401 - a module
        return isinstance(module, torch.nn.Linear) and group_of(*module.weight.shape) == group

    linear = [one for one in built.module.modules() if isinstance(one, torch.nn.Linear)]
    if not any(group_of(*one.weight.shape) for one in linear):
        raise InvalidSetting(
            f"no linear layer of the model has n a multiple of {_COLUMNS} and k of {_GROUPS[-1]}, "
            "as PyTorch packs weights of 4 bits; choose another model or --dtype."
        )
    for group in _GROUPS:
        config = int4.PrototypeInt4WeightOnlyConfig(group_size=group)
        quantization.quantize_(built.module, config, filter_fn=partial(takes, group))
    return built
