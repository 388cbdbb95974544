"""Where the time of a call goes: linear layers with our kernels, those without, and the rest."""

from collections.abc import Callable
from importlib import import_module
from time import perf_counter_ns

from gemm_tuner.domain.model_run import TimeShares

# What multiplies with constant weights under PyTorch: a product of two computed matrices is a
# `bmm`, or inside of what computes attention.
_LEFT = (
    *("aten::addmm", "aten::mm", "mkl::_mkl_linear", "mkldnn::_linear_pointwise"),
    *("onednn::qlinear_pointwise", "aten::_weight_int8pack_mm"),
    "aten::_weight_int4pack_mm_for_cpu",
    *("zentorch::zentorch_linear_unary", "zentorch::zentorch_linear_unary_binary"),
)
# The operator, and inside of it the kernel, which is named for its problem.
_OURS = ("gemm_tuner::linear", "gemm-tuner ")
_CALLS = 3


def time_shares(call: Callable[[], object]) -> TimeShares:
    """Return shares of the time of a call, by PyTorch's profiler."""
    profiler = import_module("torch").profiler
    call()
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        begin_ns = perf_counter_ns()
        for _call in range(_CALLS):
            call()
        whole_us = (perf_counter_ns() - begin_ns) / 1e3
    taken_us = left_us = 0.0
    for event in profile.key_averages():
        if event.key.startswith(_OURS):
            taken_us += event.self_cpu_time_total
        elif event.key.partition(".")[0] in _LEFT:
            left_us += event.self_cpu_time_total
    return TimeShares(taken=taken_us / whole_us, left=left_us / whole_us)
