"""Choose baselines that are installed and right."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gemm_tuner.bench.baselines.baseline import Baseline
from gemm_tuner.bench.baselines.libxsmm import Libxsmm
from gemm_tuner.bench.baselines.mkl import Mkl
from gemm_tuner.bench.baselines.onednn import OneDnn
from gemm_tuner.bench.baselines.onnx_runtime import OnnxRuntime
from gemm_tuner.bench.baselines.openblas import OpenBlas
from gemm_tuner.bench.baselines.own_kernel import OneThread, ScalarKernel
from gemm_tuner.bench.baselines.torch_eager import TorchEager
from gemm_tuner.bench.baselines.torch_inductor import TorchInductor
from gemm_tuner.bench.baselines.torch_weights import TorchWeightOnly
from gemm_tuner.bench.correctness import Case
from gemm_tuner.bench.drivers import Drivers
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.regimes import WeightCopies
from gemm_tuner.bench.tolerance import Expected, find_error
from gemm_tuner.bench.workload import make_workload
from gemm_tuner.build.compile import Build
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.epilogue import NO_EPILOGUE
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing, InvalidSetting, NotEnoughMemory, TrialFailed

AUTO = "auto"
ONE_THREAD = "one-thread"
TORCH_WEIGHTS = "torch-weights"

# What `auto` stands for: the first of these that is there and right.
_AUTO = ("onednn", "openblas", "scalar")

# A library may trade accuracy for speed in its own way, as long as it computes the same thing. One
# that does not fuse the epilogue rounds to the type of y after each step.
_FACTOR = 4.0
_TOLERANCE = 1e-4
_ROUNDINGS_TO_Y = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Materials:
    """What baselines are made of: the drivers, and kernels of ours."""

    drivers: Drivers
    scalar_build: Build
    one_thread_build: Build | None
    cpu: Cpu


# They are prepared from the last to the first: the names in MKL are visible to all that is loaded
# after it, and the MKL inside PyTorch must call itself.
# fmt: off
BASELINES: dict[str, Callable[[Materials], Baseline]] = {
    "onednn":         lambda materials: OneDnn(materials.drivers.onednn),
    "mkl":            lambda materials: Mkl(materials.drivers.mkl),
    "openblas":       lambda materials: OpenBlas(materials.drivers.openblas),
    "libxsmm":        lambda materials: Libxsmm(materials.drivers.libxsmm),
    "onnxruntime":    lambda _materials: OnnxRuntime(),
    "torch":          lambda _materials: TorchEager(),
    TORCH_WEIGHTS:    lambda _materials: TorchWeightOnly(),
    "torch-inductor": lambda _materials: TorchInductor(),
    "scalar":         lambda materials: ScalarKernel(
        materials.scalar_build, materials.cpu, materials.drivers.timer),
    ONE_THREAD:       lambda materials: OneThread(
        materials.one_thread_build, materials.cpu, materials.drivers.timer),
}
# fmt: on

# Those that take quantised weights as they are; the others get plain ones.
WEIGHT_ONLY = frozenset({TORCH_WEIGHTS, ONE_THREAD})


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedBaseline:
    """A baseline that is right; `call_s` is the time of one call of it, not warmed up."""

    name: str
    baseline: Baseline
    call_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The baselines to time beside, at least one, and by name why others were left out."""

    baselines: tuple[CheckedBaseline, ...]
    left_out: dict[str, str]


def choose_baselines(
    names: Sequence[str],
    makers: Mapping[str, Callable[[], Baseline]],
    check: Callable[[Baseline], float | str],
) -> Choice:
    """Return those of the named baselines that are there and right.

    Args:
        names: keys of `makers`; `auto` stands for the best one that can be used.
        makers: how each baseline is loaded.
        check: what is wrong with the results of a baseline, or how long it took if nothing is.

    Raises:
        InvalidSetting: a name is not known.
        BaselineMissing: all are missing or wrong.
    """
    chosen: list[CheckedBaseline] = []
    left_out: dict[str, str] = {}
    for name in names:
        if name != AUTO and name not in makers:
            raise InvalidSetting(
                f"baseline {name!r} is not known; use one of: {', '.join((AUTO, *makers))}."
            )
        for tried in _AUTO if name == AUTO else (name,):
            found = _try_baseline(tried, makers[tried], check)
            if isinstance(found, CheckedBaseline):
                chosen.append(found)
                break
            left_out[tried] = found
    if not chosen:
        raise BaselineMissing(
            f"no baseline can be used: {' '.join(left_out.values())} Choose another one."
        )
    return Choice(baselines=tuple(chosen), left_out=left_out)


def _try_baseline(
    name: str, make: Callable[[], Baseline], check: Callable[[Baseline], float | str]
) -> CheckedBaseline | str:
    """Return the baseline, or why it cannot be used."""
    try:
        baseline = make()
        checked = check(baseline)
    except (BaselineMissing, NotEnoughMemory, TrialFailed) as refusal:
        return str(refusal)
    if isinstance(checked, str):
        return f"{baseline.text}: {checked}."
    return CheckedBaseline(name=name, baseline=baseline, call_s=checked)


def check_baseline(
    baseline: Baseline, problem: Problem, case: Case, *, threads: int
) -> float | str:
    """Return the time of one call in seconds, or in words where its result is wrong."""
    workload = make_workload(problem, case.inputs, threads=threads)
    runner = baseline.prepare(workload)
    weights = WeightCopies(runner, 1, seed=0)
    expected = case.expected
    if not baseline.fuses_epilogue:
        expected = compute_expected(replace(problem, epilogue=NO_EPILOGUE), case.inputs)
    # Beside quantised weights, a library computes with weights rounded to the type of x.
    rounded_to = {problem.types.y} | ({problem.types.x} if problem.types.is_weight_only else set())
    roundoff = max(dtype.unit_roundoff for dtype in rounded_to)
    tolerance = max(_TOLERANCE, _ROUNDINGS_TO_Y * roundoff)
    bounds = _FACTOR * expected.bounds + tolerance * (1.0 + np.abs(expected.values))

    sample = runner.sample(weights.struct, warm_up_calls=0, timed_calls=1)

    error = find_error(Expected(values=expected.values, bounds=bounds), workload.y)
    return sample.elapsed_ns / 1e9 if error is None else error
