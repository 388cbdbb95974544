"""The layers of a model are tuned by their share of its time, and judged inside the model."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from gemm_tuner.domain.printable import value_text
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.layers.sources import AnySource, Source, open_source, seconds_of, tune_or_tell
from gemm_tuner.machine.measuring_lock import measuring
from gemm_tuner.torch.calls import Call, calls_of, compiled_in
from gemm_tuner.torch.eager.model_layers import ModelLayer, model_layers
from gemm_tuner.torch.eager.model_products import ModelProducts, Seeing, without_seen
from gemm_tuner.torch.eager.packed_linear import hold_all_weights
from gemm_tuner.torch.model.gains import LayerGain, ModelGain
from gemm_tuner.torch.model.kinds import Kind, LinearKind, ProductsKind
from gemm_tuner.torch.operators import library

_LOG = logging.getLogger(__name__)

# Of each layer's kernels, to choose one; and of the chosen, for what is told.
_ROUNDS_TO_CHOOSE = 5
_ROUNDS = 11

# A kernel stays if it wins this many of the last rounds: by chance, one in 30 does.
_WINS = 9

# A kernel that no verdict serves is chosen if it gains this much more: only tune_model finds it.
_BETTER_THAN_SERVED = 1.03

# A shorter sweep finds too little.
_SHORTEST_BUDGET_S = 2.0

_LONGEST_BUDGET_S = 7 * 86_400.0

# Hooks inside these switch their fast path off, in which they call no layer.
_WITH_FAST_PATH: tuple[Any, ...] = (torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)

_NOT_CALLED = "it is not called as a module in most rounds, so that no kernel can be judged."
_FASTER_THAN_SERVED = (
    "it gains more in this model than the kernel that a verdict serves, which replace takes; "
    "tune_model finds it again."
)
_NOT_SERVED = (
    "it gains in this model, but no verdict serves it: tune_model finds it again, replace does not."
)
_CAST = "it is called under autocast, where PyTorch converts the weights and calls no kernel."

# Tells of a step, and how many seconds the steps from here on may take.
OnStep = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class _Pass:
    """The seconds of the calls of a model, and those of each kind of its layers."""

    whole_s: float
    kinds_s: tuple[float, ...]


def tune_model(
    model: Any,  # noqa: ANN401 - a module
    example_inputs: Any,  # noqa: ANN401 - tensors
    *,
    source: AnySource = None,
    budget_s: float = 600.0,
    on_step: OnStep = lambda _step, _left_s: None,
) -> ModelGain:
    """Tune a model, and let those of its layers call kernels that gain by it in the model.

    These are its linear layers, and its modules that call `scaled_dot_product_attention`,
    `torch.matmul` or `torch.bmm` of two activations.

    The time goes to the layers by their shares of the time of the model. What was tuned before is
    not tuned again. Then each layer's best kernels are timed inside the model, in alternation with
    PyTorch's own: one that is fast alone may not be so there. The layers become what `replace`
    makes of them; `restore` takes it back.

    Args:
        model: a `torch.nn.Module` for inference, changed in place.
        example_inputs: what the model is called with: a tensor, a tuple, or a dict of keyword
            arguments; or a list of these, such as the batches that a server sees.
        source: as in `replace`. A service tunes nothing: its kernels are timed in the model.
        budget_s: the time to tune all layers, in seconds; 0 tunes nothing.
        on_step: is told what is done, and for how many seconds it may go on.

    Raises:
        InvalidSetting: the model is no module, there are no inputs, they cannot be copied, or the
            budget is no number of seconds.
        GemmTunerError: the source cannot be opened, or the operators cannot be built.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidSetting(
            f"the model is of type {type(model).__name__}; give a torch.nn.Module, whose layers "
            "can be tuned."
        )
    return tune_calls(
        model, calls_of(example_inputs), source=source, budget_s=budget_s, on_step=on_step
    )


def tune_calls(
    model: Any,  # noqa: ANN401 - a module
    calls: Sequence[Call],
    *,
    source: AnySource,
    budget_s: float,
    on_step: OnStep,
) -> ModelGain:
    """Do what `tune_model` does for the calls that were made of a model.

    Raises:
        GemmTunerError: as in `tune_model`.
        NotRepeated: a call that a script made fails now.
    """
    if not calls:
        raise InvalidSetting("there are no example inputs; give at least one.")
    budget_s = _checked_budget(budget_s)
    hold_all_weights(model)
    for call in calls:
        call.copied()
    _warn_of_statistics(model)
    library()
    opened = open_source(source)
    with torch.no_grad(), measuring():
        on_step("the model as it is", budget_s)
        seeing = Seeing(model)
        copied = [one.copied() for one in calls]
        seen = model_layers(model, calls=copied, around=seeing.on())
        layers = without_seen(seen, seeing.found)
        why_left = _CAST if all(one.is_cast for one in calls) else None
        kinds = _kinds(layers, seeing.found, opened, why_left)
        for kind in kinds:
            kind.use(None)
        try:
            passes = [_timed(model, kinds, calls) for _ in range(1 + _ROUNDS_TO_CHOOSE)][1:]
            times = [median(of_kind) for of_kind in zip(*(p.kinds_s for p in passes), strict=True)]
            _tune(kinds, times, opened, budget_s, on_step)
            on_step("kernels inside the model", 0.0)
            _choose(model, kinds, calls)
            return _judged(model, kinds, calls)
        except BaseException:
            for kind in kinds:
                kind.use(None)
            raise


def _checked_budget(budget_s: object) -> float:
    seconds = seconds_of(budget_s)
    if not 0 <= seconds <= _LONGEST_BUDGET_S:
        raise InvalidSetting(
            f"budget_s is {value_text(budget_s)}; give seconds, at most those of a week, or 0 to "
            "tune nothing."
        )
    return seconds


def _warn_of_statistics(model: Any) -> None:  # noqa: ANN401 - a module
    """Say that calls change a model, where they do."""
    for name, one in model.named_modules():
        if one.training and getattr(one, "running_mean", None) is not None:
            _LOG.warning(
                "%s is in training mode: each call changes its running statistics; call "
                "model.eval() first.",
                name or type(one).__name__,
            )
            return


def _kinds(
    layers: Sequence[ModelLayer],
    products: Sequence[ModelProducts],
    source: Source,
    why_left: str | None,
) -> list[Kind]:
    """Return the layers by what they compute; those that stay are alike if for one reason."""
    alike: dict[object, list[ModelLayer]] = {}
    for one in layers:
        alike.setdefault(one.wanted or (one.problem, one.why_left), []).append(one)
    linear = [LinearKind(of_kind, source, why_left) for of_kind in alike.values()]
    of_products: dict[object, list[ModelProducts]] = {}
    for each in products:
        of_products.setdefault((each.problem, each.why_left), []).append(each)
    return [*linear, *(ProductsKind(one, source, why_left) for one in of_products.values())]


def _tune(
    kinds: Sequence[Kind],
    times: Sequence[float],
    source: Source,
    budget_s: float,
    on_step: OnStep,
) -> None:
    """Tune the kinds that take the longest first, and learn what there is for each."""
    asked = sorted(
        ((kind, time) for kind, time in zip(kinds, times, strict=True) if kind.wanted),
        key=lambda one: -one[1],
    )
    whole = sum(time for _kind, time in asked) or 1.0
    left_s = budget_s
    for kind, time in asked:
        rows = sum(len(one.rows) for one in kind.wanted)
        shortest_s = _SHORTEST_BUDGET_S * rows
        own_s = min(left_s, max(budget_s * time / whole, shortest_s))
        told = f"{own_s:.1f} s were left to tune it, which is too short." if budget_s else ""
        if own_s >= shortest_s:
            on_step(f"tuning {kind.layers[0].problem}, {time / whole:.0%} of the layers", left_s)
            failed = [tune_or_tell(source, wanted, own_s / rows) for wanted in kind.wanted]
            told = " ".join(dict.fromkeys(filter(None, failed)))
            left_s -= own_s
        kind.learn(source)
        if not kind.ways:
            kind.reason = told or kind.reason


def _choose(model: Any, kinds: Sequence[Kind], calls: Sequence[Call]) -> None:  # noqa: ANN401
    """Let each kind use the kernels that gain the most in the model, if any do."""
    best: list[tuple[float, Any]] = [(1.0, None) for _kind in kinds]
    for number in range(max((len(kind.ways) for kind in kinds), default=0)):
        for kind in kinds:
            kind.use(kind.ways[number] if number < len(kind.ways) else None)
        rounds = _rounds(model, kinds, calls, _ROUNDS_TO_CHOOSE)
        for place, kind in enumerate(kinds):
            gain = _gain(rounds, place)
            known, known_way = best[place]
            if known_way is not None and known_way is kind.served:
                known *= _BETTER_THAN_SERVED
            if kind.way is not None and gain > known:
                best[place] = gain, kind.way
    for kind, (_gained, way) in zip(kinds, best, strict=True):
        kind.use(way)


def _judged(model: Any, kinds: Sequence[Kind], calls: Sequence[Call]) -> ModelGain:  # noqa: ANN401
    """Time the chosen kernels anew, take back those that do not gain, and tell of all."""
    lost: dict[int, tuple[float, str]] = {}
    rounds = _rounds(model, kinds, calls, _ROUNDS, is_whole=True)
    for place, kind in enumerate(kinds):
        wins = sum(plain.kinds_s[place] > tuned.kinds_s[place] > 0 for plain, tuned in rounds)
        if kind.way is not None and wins < _WINS:
            why = f"in the model, it is faster in {wins} of {_ROUNDS} rounds."
            lost[place] = _taken_back(kind, place, rounds, why)
    if lost:
        rounds = _rounds(model, kinds, calls, _ROUNDS, is_whole=True)
    if _speedup(rounds) < 1.0:
        for place, kind in enumerate(kinds):
            if kind.way is not None:
                lost[place] = _taken_back(kind, place, rounds, "the whole model is not faster.")
    is_changed = any(kind.way is not None for kind in kinds)
    plain_s = median(plain.whole_s for plain, _tuned in rounds)
    gains = [
        _layer_gain(kind, place, rounds, plain_s, lost.get(place))
        for place, kind in enumerate(kinds)
    ]
    return ModelGain(
        plain_s=plain_s,
        tuned_s=median(tuned.whole_s for _plain, tuned in rounds) if is_changed else plain_s,
        speedup=_speedup(rounds) if is_changed else 1.0,
        layers=tuple(sorted(gains, key=lambda one: -one.plain_s)),
    )


def _taken_back(
    kind: Kind, place: int, rounds: Sequence[tuple[_Pass, _Pass]], why: str
) -> tuple[float, str]:
    """Let the layers of a kind be ordinary ones, and return the time with kernels, and why."""
    kind.use(None)
    return median(tuned.kinds_s[place] for _plain, tuned in rounds), why


def _speedup(rounds: Sequence[tuple[_Pass, _Pass]]) -> float:
    return median(plain.whole_s / tuned.whole_s for plain, tuned in rounds)


def _layer_gain(
    kind: Kind,
    place: int,
    rounds: Sequence[tuple[_Pass, _Pass]],
    whole_s: float,
    lost: tuple[float, str] | None,
) -> LayerGain:
    plain_s = median(plain.kinds_s[place] for plain, _tuned in rounds)
    tuned_s = median(tuned.kinds_s[place] for _plain, tuned in rounds)
    reason = kind.reason
    is_served = kind.way is not None and kind.way is kind.served
    if kind.way is not None and not is_served:
        reason = _FASTER_THAN_SERVED if kind.served else _NOT_SERVED
    if kind.ways and kind.way is None:
        reason = "in the model, no kernel is faster than what PyTorch calls."
        if not plain_s:
            reason = _NOT_CALLED
    if isinstance(kind, ProductsKind) and kind.way is not None:
        reason = f"{kind.taken_of(kind.way)}{reason}"
    if lost is not None:
        tuned_s, reason = lost
    return LayerGain(
        names=tuple(one.name for one in kind.layers),
        problem=kind.layers[0].problem,
        share=plain_s / whole_s,
        plain_s=plain_s,
        tuned_s=tuned_s if kind.way is not None or lost is not None else None,
        is_taken=kind.way is not None,
        reason=reason,
        is_served=is_served,
    )


def _gain(rounds: Sequence[tuple[_Pass, _Pass]], place: int) -> float:
    """Return how many times as fast the layers of a kind are with kernels."""
    return median(
        plain.kinds_s[place] / tuned.kinds_s[place] if tuned.kinds_s[place] else 1.0
        for plain, tuned in rounds
    )


def _rounds(
    model: Any,  # noqa: ANN401 - a module
    kinds: Sequence[Kind],
    calls: Sequence[Call],
    count: int,
    *,
    is_whole: bool = False,
) -> list[tuple[_Pass, _Pass]]:
    """Return rounds of all calls, plain and with kernels, after one of each that warms up."""
    rounds = []
    for number in range(count + 1):
        passes = {}
        for is_on in (False, True) if number % 2 else (True, False):
            for kind in kinds:
                kind.switch(is_on=is_on)
            passes[is_on] = _timed(model, kinds, calls, is_whole=is_whole)
        rounds.append((passes[False], passes[True]))
    for kind in kinds:
        kind.switch(is_on=True)
    return rounds[1:]


def _timed(
    model: Any,  # noqa: ANN401 - a module
    kinds: Sequence[Kind],
    calls: Sequence[Call],
    *,
    is_whole: bool = False,
) -> _Pass:
    """Make all calls of a model, and return their times.

    `is_whole` makes each once more for the time of the whole model, which no stopwatch slows then.
    """
    whole_s = 0.0
    kinds_s = [0.0 for _kind in kinds]
    for call in calls:
        with _stopwatches(model, kinds) as seconds:
            call_s = _call_s(model, call)
        whole_s += (_call_s(model, call) if is_whole else call_s) * call.count
        for place, one in enumerate(seconds):
            kinds_s[place] += one * call.count
    return _Pass(whole_s, tuple(kinds_s))


def _call_s(model: Any, call: Call) -> float:  # noqa: ANN401 - a module
    copied = call.copied()
    begin_s = perf_counter()
    copied.on(model)
    return perf_counter() - begin_s


@dataclass(slots=True)
class _Running:
    """A module that runs since `began_s`, and the time of those inside it that are another's."""

    began_s: float
    is_whole: bool
    others_s: float = 0.0


@contextmanager
def _stopwatches(model: Any, kinds: Sequence[Kind]) -> Iterator[list[float]]:  # noqa: ANN401
    """Yield the seconds that the layers of each kind take until then.

    A layer inside another is part of that one's time; one inside a module with products is not.
    """
    seconds = [0.0 for _kind in kinds]
    running: list[_Running] = []

    def watch(module: Any, place: int) -> list[Any]:  # noqa: ANN401 - handles of PyTorch
        is_whole = kinds[place].is_whole

        def begin(_module: object, _inputs: object) -> None:
            running.append(_Running(perf_counter(), is_whole))

        def end(_module: object, _inputs: object, _output: object) -> None:
            ended_s = perf_counter()
            if not running:
                return
            one = running.pop()
            if any(outer.is_whole for outer in running):
                return
            whole_s = ended_s - one.began_s
            seconds[place] += whole_s - one.others_s
            if running:
                running[-1].others_s += whole_s

        return [
            module.register_forward_pre_hook(begin),
            module.register_forward_hook(end, prepend=True, always_call=True),
        ]

    unseen = compiled_in(model) | {
        id(inner)
        for one in model.modules()
        if isinstance(one, _WITH_FAST_PATH)
        for inner in one.modules()
    }
    handles = [
        handle
        for place, kind in enumerate(kinds)
        for layer in kind.layers
        if id(layer.module) not in unseen
        for handle in watch(layer.module, place)
    ]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()
