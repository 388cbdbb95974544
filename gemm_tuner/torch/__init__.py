"""Tuned kernels inside models of PyTorch.

    import gemm_tuner.torch

    gemm_tuner.torch.enable()                        # what torch.compile compiles from now on
    gemm_tuner.torch.replace(model, example_inputs)  # linear layers, in eager mode

A layer is taken where a kernel was tuned for it and won; all others stay as they are.
"""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError(
        'gemm_tuner.torch needs PyTorch: pip install "gemm-tuner[torch]".', name="torch"
    )

from gemm_tuner.torch.collecting import collect
from gemm_tuner.torch.compiling import disable, enable
from gemm_tuner.torch.debugging import Accuracy, debug
from gemm_tuner.torch.exporting import load_kernels
from gemm_tuner.torch.replacement import refresh, replace, restore
from gemm_tuner.torch.report import LayerReport, Report
from gemm_tuner.torch.tuning import LayerGain, ModelGain, tune_model

__all__ = [
    "Accuracy",
    "LayerGain",
    "LayerReport",
    "ModelGain",
    "Report",
    "collect",
    "debug",
    "disable",
    "enable",
    "load_kernels",
    "refresh",
    "replace",
    "restore",
    "tune_model",
]
