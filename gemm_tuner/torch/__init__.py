"""Tuned kernels inside models of PyTorch.

    import gemm_tuner.torch

    gemm_tuner.torch.enable()                        # what torch.compile compiles from now on
    gemm_tuner.torch.replace(model, example_inputs)  # linear layers, in eager mode

A layer is taken where a kernel was tuned for it and won; all others stay as they are. The names
below are loaded when they are first used: `replace` needs nothing of the compiler.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if find_spec("torch") is None:
    raise ModuleNotFoundError(
        'gemm_tuner.torch needs PyTorch: pip install "gemm-tuner[torch]".', name="torch"
    )

if TYPE_CHECKING:
    from gemm_tuner.torch.eager.freeing import Freed as Freed
    from gemm_tuner.torch.eager.freeing import free_weights as free_weights
    from gemm_tuner.torch.eager.replacement import refresh as refresh
    from gemm_tuner.torch.eager.replacement import replace as replace
    from gemm_tuner.torch.eager.replacement import restore as restore
    from gemm_tuner.torch.inductor.enabling import disable as disable
    from gemm_tuner.torch.inductor.enabling import enable as enable
    from gemm_tuner.torch.inductor.exporting import load_kernels as load_kernels
    from gemm_tuner.torch.model.collecting import collect as collect
    from gemm_tuner.torch.model.comparing import Comparison as Comparison
    from gemm_tuner.torch.model.comparing import compare as compare
    from gemm_tuner.torch.model.debugging import Accuracy as Accuracy
    from gemm_tuner.torch.model.debugging import debug as debug
    from gemm_tuner.torch.model.gains import LayerGain as LayerGain
    from gemm_tuner.torch.model.gains import ModelGain as ModelGain
    from gemm_tuner.torch.model.tuning import tune_model as tune_model
    from gemm_tuner.torch.report import LayerReport as LayerReport
    from gemm_tuner.torch.report import Report as Report

_HOMES = {
    "collect": "gemm_tuner.torch.model.collecting",
    "Comparison": "gemm_tuner.torch.model.comparing",
    "compare": "gemm_tuner.torch.model.comparing",
    "disable": "gemm_tuner.torch.inductor.enabling",
    "enable": "gemm_tuner.torch.inductor.enabling",
    "Accuracy": "gemm_tuner.torch.model.debugging",
    "debug": "gemm_tuner.torch.model.debugging",
    "Freed": "gemm_tuner.torch.eager.freeing",
    "free_weights": "gemm_tuner.torch.eager.freeing",
    "load_kernels": "gemm_tuner.torch.inductor.exporting",
    "refresh": "gemm_tuner.torch.eager.replacement",
    "replace": "gemm_tuner.torch.eager.replacement",
    "restore": "gemm_tuner.torch.eager.replacement",
    "LayerReport": "gemm_tuner.torch.report",
    "Report": "gemm_tuner.torch.report",
    "LayerGain": "gemm_tuner.torch.model.gains",
    "ModelGain": "gemm_tuner.torch.model.gains",
    "tune_model": "gemm_tuner.torch.model.tuning",
}

__all__ = [
    "Accuracy",
    "Comparison",
    "Freed",
    "LayerGain",
    "LayerReport",
    "ModelGain",
    "Report",
    "collect",
    "compare",
    "debug",
    "disable",
    "enable",
    "free_weights",
    "load_kernels",
    "refresh",
    "replace",
    "restore",
    "tune_model",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'gemm_tuner.torch' has no attribute {name!r}.")
    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found  # the next time, this function is not called
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
