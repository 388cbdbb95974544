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
    from gemm_tuner.torch.collecting import collect as collect
    from gemm_tuner.torch.comparing import Comparison as Comparison
    from gemm_tuner.torch.comparing import compare as compare
    from gemm_tuner.torch.debugging import Accuracy as Accuracy
    from gemm_tuner.torch.debugging import debug as debug
    from gemm_tuner.torch.enabling import disable as disable
    from gemm_tuner.torch.enabling import enable as enable
    from gemm_tuner.torch.exporting import load_kernels as load_kernels
    from gemm_tuner.torch.freeing import Freed as Freed
    from gemm_tuner.torch.freeing import free_weights as free_weights
    from gemm_tuner.torch.gains import LayerGain as LayerGain
    from gemm_tuner.torch.gains import ModelGain as ModelGain
    from gemm_tuner.torch.replacement import refresh as refresh
    from gemm_tuner.torch.replacement import replace as replace
    from gemm_tuner.torch.replacement import restore as restore
    from gemm_tuner.torch.report import LayerReport as LayerReport
    from gemm_tuner.torch.report import Report as Report
    from gemm_tuner.torch.tuning import tune_model as tune_model

_HOMES = {
    "collect": "gemm_tuner.torch.collecting",
    "Comparison": "gemm_tuner.torch.comparing",
    "compare": "gemm_tuner.torch.comparing",
    "disable": "gemm_tuner.torch.enabling",
    "enable": "gemm_tuner.torch.enabling",
    "Accuracy": "gemm_tuner.torch.debugging",
    "debug": "gemm_tuner.torch.debugging",
    "Freed": "gemm_tuner.torch.freeing",
    "free_weights": "gemm_tuner.torch.freeing",
    "load_kernels": "gemm_tuner.torch.exporting",
    "refresh": "gemm_tuner.torch.replacement",
    "replace": "gemm_tuner.torch.replacement",
    "restore": "gemm_tuner.torch.replacement",
    "LayerReport": "gemm_tuner.torch.report",
    "Report": "gemm_tuner.torch.report",
    "LayerGain": "gemm_tuner.torch.gains",
    "ModelGain": "gemm_tuner.torch.gains",
    "tune_model": "gemm_tuner.torch.tuning",
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
