"""Models whose weights, or all operands of whose layers, are bytes, as torchao makes them."""

from importlib import import_module
from typing import Any

from gemm_tuner.models.row import Built


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
