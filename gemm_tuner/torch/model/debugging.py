"""Which layer of a model is wrong, where its output is not what PyTorch computes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median
from threading import RLock
from typing import Any

import torch
from torch.utils import _pytree

from gemm_tuner.abi import ArgsStruct
from gemm_tuner.bench.reproduce import KernelCall
from gemm_tuner.domain.printable import quoted
from gemm_tuner.domain.units import time_text
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.torch.calls import Call, calls_of
from gemm_tuner.torch.eager.packed_linear import hold_all_weights
from gemm_tuner.torch.model.debug_folder import checked_folder, write_folder
from gemm_tuner.torch.model.judging import Judge, LayerError, WrongCall, smallest
from gemm_tuner.torch.model.runs import Runs

# Of the largest element of an output: where some numbers are of 16 or 8 bits, and where none are.
_COARSE, _FINE = 5e-2, 1e-4
_SHORT = (torch.bfloat16, torch.float16, torch.int8, torch.uint8)

_TIMED_RUNS = 3

# It changes how PyTorch compiles in all threads, and takes that back.
_ONE_AT_A_TIME = RLock()

# Errors of PyTorch may be this many times as large as those of kernels.
_OURS_OVER_OTHERS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """What was found: `verdict` says it in words; of `layers`, those nearest their bound are first.

    `difference` is how far an element of the output is from what PyTorch computes, as a share of
    the largest element. `wrong` is the name of the first layer that is wrong by itself.
    """

    verdict: str
    difference: float
    tolerance: float
    wrong: str | None
    layers: tuple[LayerError, ...]
    folder: Path | None = None

    def __str__(self) -> str:
        """Return the verdict, and a line for each layer."""
        lines = [self.verdict, f"{'of bound':>9}  {'calls':>5}  {'time':>8}  layer"]
        for one in self.layers:
            time = time_text(one.seconds * 1e9)
            state = f": WRONG: {one.why_wrong}" if one.why_wrong else ""
            lines.append(
                f"{one.share:9.3g}  {one.calls:5}  {time:>8}  {quoted(one.name)}: {one.problem}"
                f"{state}"
            )
        return "\n".join(lines)


def debug(
    model: Any,  # noqa: ANN401 - a module
    example_inputs: Any,  # noqa: ANN401 - tensors
    *,
    folder: str | Path | None = None,
    tolerance: float | None = None,
) -> Accuracy:
    """Find the first layer of a model that is wrong by itself, or say that none is.

    The model is called as it is: with layers that `replace` or `tune_model` changed, or compiled
    after `enable`. Each call of a kernel is compared with the exact result, in float64, of what
    that call read; it may differ by the error bound that every kernel is proved with.

    What torch.compile has compiled in this process is compiled again, for this and after it.

    Args:
        model: a `torch.nn.Module` for inference.
        example_inputs: what it is called with: a tensor, a tuple, or a dict of keyword arguments;
            or a list of these.
        folder: a new or empty folder for what was found: `index.md`, the graphs before and after
            the pass, the C++ of the kernels, and the smallest call that is wrong, with a script
            that makes it without PyTorch. None writes nothing.
        tolerance: how far an element of the output may be from what PyTorch computes, as a share of
            the largest element; by default 1e-4, or 0.05 where there are numbers of 16 or 8 bits.

    Raises:
        InvalidSetting: the model is not on the CPU, changes from call to call, or calls no kernel,
            or an argument cannot be used.
        StoreFailed: the folder cannot be written.
        GemmTunerError: the operators cannot be built.
    """
    calls = calls_of(example_inputs)
    hold_all_weights(model)
    _check(model, calls, tolerance)
    path = None if folder is None else checked_folder(folder)
    with _ONE_AT_A_TIME, Runs(model, calls) as runs:
        expected = runs.plain()
        allowed = _tolerance(model, expected) if tolerance is None else tolerance
        if _difference(runs.plain(), expected) > allowed:
            raise InvalidSetting(
                "what the model computes changes from call to call, also without kernels; call "
                "model.eval(), and give a model that keeps nothing from one call to the next."
            )
        judge = Judge(runs.known)
        given = runs.as_given()
        as_given = 0.0 if given is None else _difference(given, expected)
        computed = runs.watched(judge.see)
        off = _difference(computed, expected)
        if not judge.errors:
            raise InvalidSetting(_why_no_kernel(judge, runs))
        wrong = judge.first_wrong
        smaller = smallest(wrong) if wrong else None
        layers = _with_times(judge, runs)
        if wrong:
            verdict = _verdict_of(wrong, smaller)
        elif off <= allowed:
            verdict = _verdict_of_weights(as_given, allowed)
        else:
            verdict = _verdict_of_model(judge, runs, computed, expected, allowed)
        found = Accuracy(
            verdict=verdict,
            difference=max(off, as_given),
            tolerance=allowed,
            wrong=wrong.name if wrong else None,
            layers=layers,
            folder=path,
        )
        if path is not None:
            write_folder(
                path,
                str(found),
                kernels=judge.kernels,
                sources=runs.sources(),
                graphs=runs.graphs,
                wrong_call=smaller,
            )
        return found


def _check(model: Any, calls: Sequence[Call], tolerance: object) -> None:  # noqa: ANN401
    """Check what is given, as far as that is seen before the model is called.

    Raises:
        InvalidSetting: it cannot be used.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidSetting(
            f"the model is of type {type(model).__name__}; give a torch.nn.Module, or what "
            "torch.compile made of one."
        )
    if not calls:
        raise InvalidSetting("there are no example inputs; give at least one.")
    if tolerance is not None and not (isinstance(tolerance, int | float) and 0 <= tolerance < inf):
        raise InvalidSetting(
            f"tolerance is {tolerance!r}; give a share of the largest element, such as 1e-4."
        )
    inputs = _pytree.tree_leaves([(one.arguments, dict(one.keywords)) for one in calls])
    tensors = [("an input", one) for one in inputs if isinstance(one, torch.Tensor)]
    for name, one in [*model.named_parameters(), *model.named_buffers(), *tensors]:
        if one.device.type != "cpu":
            raise InvalidSetting(
                f"{name} is on the device {one.device}, and kernels run on the CPU; "
                "give a model with its weights, and inputs, on the CPU."
            )
    for name, one in model.named_modules():
        is_random = isinstance(one, torch.nn.modules.dropout._DropoutNd) and one.p > 0  # noqa: SLF001
        if one.training and (is_random or getattr(one, "running_mean", None) is not None):
            raise InvalidSetting(
                f"{name or 'the model'} is a {type(one).__name__} in training mode, so that each "
                "call computes something else; call model.eval() first."
            )


def _tolerance(model: Any, outputs: Sequence[Any]) -> float:  # noqa: ANN401 - a module
    is_coarse = torch.is_autocast_enabled("cpu") or any(
        one.dtype in _SHORT for one in [*model.parameters(), *model.buffers(), *outputs]
    )
    return _COARSE if is_coarse else _FINE


def _difference(outputs: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest difference of an element, as a share of the largest of its tensor.

    It is infinite where the tensors are not alike, or where only one has a NaN or an infinity.
    """
    if [one.shape for one in outputs] != [one.shape for one in expected]:
        return inf
    return max(map(_difference_of_one, outputs, expected))


def _difference_of_one(y: Any, expected: Any) -> float:  # noqa: ANN401 - tensors
    if y.is_complex() or expected.is_complex():
        y, expected = (torch.view_as_real(one.to(torch.complex128)) for one in (y, expected))
    y, expected = y.double(), expected.double()
    is_same = (y == expected) | (y.isnan() & expected.isnan())
    distance = torch.where(is_same, 0.0, (y - expected).abs())
    if not distance.isfinite().all():
        return inf
    largest = float(expected[expected.isfinite()].abs().max()) if expected.isfinite().any() else 0.0
    most = float(distance.max()) if distance.numel() else 0.0
    if most == 0:
        return 0.0
    return most / largest if largest else inf


def _with_times(judge: Judge, runs: Runs) -> tuple[LayerError, ...]:
    """Return the layers with the times of their calls, those nearest their bound first."""
    seconds: list[dict[str, float]] = []

    def see(number: int, args: ArgsStruct, time_ns: int) -> None:
        known = runs.known(number, args)
        if known is not None:
            seconds[-1][known.name] = seconds[-1].get(known.name, 0.0) + time_ns * 1e-9

    for _ in range(_TIMED_RUNS):
        seconds.append({})
        runs.watched(see)
    layers = [
        replace(one, seconds=median(of_run.get(name, 0.0) for of_run in seconds))
        for name, one in judge.errors.items()
    ]
    return tuple(sorted(layers, key=lambda one: -one.share))


def _verdict_of(wrong: WrongCall, smaller: KernelCall | None) -> str:
    """Return what is said of the first layer that is wrong by itself."""
    head = f"{quoted(wrong.name)} is wrong, in its call {wrong.number}: {wrong.why}."
    sha256 = wrong.kernel_call.kernel.artifact.sha256
    if smaller is None:
        return (
            f"{head} Its kernel {sha256[:12]} is right when it makes the same call alone: "
            "something else has written to its arrays, or its parts disturb each other."
        )
    if smaller.packed is None:
        return (
            f"{head} Its kernel {sha256} is wrong by itself; layers after it read what it "
            "computed. Leave it out with restore or disable, and report the kernel with its call."
        )
    return (
        f"{head} Its packed weights are not its weights: these were written in a way that PyTorch "
        "does not count. Call gemm_tuner.torch.refresh(model) after that."
    )


def _verdict_of_weights(as_given: float, allowed: float) -> str:
    """Return what is said where a model computes what PyTorch does, compiled anew if at all."""
    if as_given > allowed:
        return (
            f"No layer is wrong, and the model is right once it is compiled anew; as it was, its "
            f"output was off by {as_given:.2g}. Its weights have changed since: compile it after "
            "each change."
        )
    return f"No layer is wrong, and the output is within {allowed:.2g} of what PyTorch computes."


def _verdict_of_model(
    judge: Judge, runs: Runs, computed: Sequence[Any], expected: Sequence[Any], allowed: float
) -> str:
    """Return what is said where the output is off, and every layer is right by itself."""
    off = _difference(computed, expected)
    head = f"No layer is wrong by itself, but the output is off by {off:.2g}."
    moved = _difference(computed, runs.watched(judge.correct))
    if moved * _OURS_OVER_OTHERS >= off:
        return (
            f"{head} Errors add up: it moves by {moved:.2g} where each kernel's result is replaced "
            "by the exact one. The model makes small errors large, those of PyTorch too."
        )
    head = f"{head} It moves by {moved:.2g} where each kernel's result is replaced by the exact one"
    without = runs.without_pass()
    if without is None:
        return f"{head}: what differs lies between the layers."
    plain = _difference(without, expected)
    if plain > allowed:
        return f"{head}, and is off by {plain:.2g} where torch.compile is used without kernels."
    return (
        f"{head}, and is right where torch.compile is used without kernels: what differs is the "
        "graph. Report it with the graphs before and after the pass."
    )


def _why_no_kernel(judge: Judge, runs: Runs) -> str:
    if judge.unknown:
        return (
            f"{judge.unknown} calls of kernels were seen, but of no layer that is known; give the "
            "model itself, with its layers."
        )
    left = "; ".join(one.text for one in runs.graphs.reports)
    return (
        "no kernel was called with these inputs in this thread: no layer has one for so many rows, "
        f"PyTorch or oneDNN computes each, or other threads of the model call it. {left}".rstrip()
    )
