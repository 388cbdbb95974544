"""Which products a model computes: how often, of what sizes, and what share of its time."""

import csv
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from io import StringIO
from itertools import chain
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch

from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import GemmTunerError
from gemm_tuner.files import written_whole
from gemm_tuner.torch.calls import calls_of
from gemm_tuner.torch.eager.packed_linear import hold_all_weights
from gemm_tuner.torch.model.parameter_names import ParameterNames
from gemm_tuner.torch.model.recorder import Kind, Recorder
from gemm_tuner.torch.operators import TYPES

_WARM_UPS = 1

# What takes the zero point of x off, and scales the sums of bytes.
_STEPS_OF_BYTES = ("x_zero_point", "channel_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Product(Kind):
    """Products of one kind: y (m, n) = x (m, k) @ w, `batch` of them in a call.

    `weights` are the names of the parameters that they multiply with. Where there are none, w is
    computed by the model, and lies as `w_layout` says: where it was copied, as it lay before that.
    `share` is of the time of the model.

    Attention has steps to its `scores`: m queries, n keys, and heads of k elements.
    """

    weights: tuple[str, ...]
    calls: int
    seconds: float
    share: float

    @property
    def sizes(self) -> str:
        """Return the sizes as `128x3072x768`, with the batch before them."""
        sizes = f"{self.m}x{self.n}x{self.k}"
        return sizes if self.batch == 1 else f"{self.batch} of {sizes}"

    @property
    def operation(self) -> Operation:
        """Return whether w is constant, or whether this is attention."""
        if self.scores:
            return Operation.ATTENTION
        return Operation.LINEAR if self.weights else Operation.MATMUL

    @property
    def name(self) -> str:
        """Return a name for a file of layers: that of the first weights, or the sizes."""
        if self.scores:
            return f"attention_{self.n}x{self.k}"
        if not self.weights:
            return f"matmul_{self.n}x{self.k}_{self.w_layout}"
        return self.weights[0].removesuffix(".weight").replace(".", "_")

    @property
    def problem(self) -> str:
        """Return the problem of one of them as text, as `gemm-tuner resolve` takes its words."""
        words = self.operation.words
        sizes = f"{self.m}x{self.n}x{self.k}"
        steps = self.scores or f"{self.w_layout} {'bias' if self.has_bias else 'none'}"
        return " ".join([*words, self.dtype, sizes, steps])

    @property
    def weights_text(self) -> str:
        """Return the first of the weights and how many more there are, or the problem."""
        if not self.weights:
            return f"none: {self.problem}"
        more = f" and {len(self.weights) - 1} more" if len(self.weights) > 1 else ""
        return f"{self.weights[0]}{more}"


class Collected(Sequence[Product]):
    """The products of a model, the longest first; printed, a table."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = tuple(sorted(products, key=lambda one: -one.seconds))

    def __getitem__(self, place: int) -> Product:  # type: ignore[override]  # no slices
        """Return one kind of product."""
        return self._products[place]

    def __len__(self) -> int:
        """Return the number of kinds."""
        return len(self._products)

    @property
    def rest(self) -> float:
        """Return the share of the time that everything else takes."""
        return max(0.0, 1.0 - sum(one.share for one in self))

    def __str__(self) -> str:
        """Return a table."""
        width = max([5, *(len(one.dtype) for one in self)])
        lines = [f"{'share':>6}  {'calls':>5}  {'type':{width}} {'m x n x k':24} weights"]
        for one in self:
            sizes = f"{one.sizes} +bias" if one.has_bias else one.sizes
            lines.append(
                f"{one.share:6.1%}  {one.calls:5}  {one.dtype:{width}} {sizes:24} "
                f"{one.weights_text}"
            )
        lines.append(f"{self.rest:6.1%}  everything else, such as operators without such products")
        return "\n".join(lines)

    def write_layers(self, path: Path | str, *, dtype: str = "f32") -> int:
        """Write the products of one type as `gemm-tuner sweep` reads them.

        A batch is tuned as one of its products. Of bytes, only products with constant weights are
        written, since no other is computed by kernels.

        Returns:
            How many were written.
        """
        layers = [
            one
            for one in self
            if one.dtype == dtype
            and one.m * one.n * one.k
            and (one.weights or dtype in TYPES.values())
            and (not one.scores or _is_problem(one.problem))
        ]
        table = StringIO(newline="")
        writer = csv.writer(table, lineterminator="\n")
        columns = ("name", "m", "n", "k", "epilogue", "w_layout", "operation", "from")
        writer.writerow(columns)
        for one in layers:
            name = f"{one.name}_m{one.m}"
            first = _STEPS_OF_BYTES if dtype.endswith("_s8_s32_f32") else ()
            last = ["bias"] if one.has_bias else []
            epilogue = one.scores or "+".join([*first, *last]) or "none"
            told = f"{one.calls} calls, {one.share:.1%} of the time"
            how = epilogue, one.w_layout, one.operation.value
            writer.writerow([name, one.m, one.n, one.k, *how, told])
        with written_whole(Path(path)) as file:  # names of modules are any text
            file.write(table.getvalue().encode(errors="backslashreplace"))
        return len(layers)


def _is_problem(text: str) -> bool:
    """Return whether kernels are generated for such a problem."""
    try:
        Problem.parse(text)
    except GemmTunerError:
        return False
    return True


def _collected(recorder: Recorder, whole_s: float, repeats: int = 1) -> Collected:
    """Return what was seen in `whole_s` seconds, as one of `repeats` calls."""
    return Collected(
        [
            Product(
                **asdict(kind),
                weights=tuple(seen.weights),
                calls=seen.calls // repeats,
                seconds=seen.seconds / repeats,
                share=min(1.0, seen.seconds / whole_s),
            )
            for kind, seen in recorder.seen.items()
        ]
    )


def collect(
    model: Any,  # noqa: ANN401 - a module
    example_inputs: Any,  # noqa: ANN401 - tensors
    *,
    repeats: int = 3,
) -> Collected:
    """Return the products that a model computes for inputs, with their shares of its time.

    The model is called without gradients, once to warm up and then `repeats` times; what is told of
    is one call.

    Args:
        model: a `torch.nn.Module`, or anything that is called.
        example_inputs: a tensor, a tuple, or a dict of keyword arguments; or a list of these, such
            as the batches that a server sees.
        repeats: how often each is called.
    """
    calls = calls_of(example_inputs)
    hold_all_weights(model)
    names = ParameterNames()
    recorder = Recorder(names)
    with torch.no_grad():
        for call in calls * _WARM_UPS:
            call.on(model)
        if isinstance(model, torch.nn.Module):  # whose parameters are made by now
            for name, parameter in (*model.named_buffers(), *model.named_parameters()):
                names.add(parameter, name)
        torch.clear_autocast_cache()  # so that what is converted is seen
        begin_s = perf_counter()
        with recorder:
            for call in calls * repeats:
                call.on(model)
        whole_s = perf_counter() - begin_s
    return _collected(recorder, whole_s, repeats)


class Recording:
    """Collects the products that this thread computes in a `with` block, whatever module asks.

    The time of the model is that of the outermost modules.
    """

    def __init__(self) -> None:
        self._names = ParameterNames()
        self._recorder = Recorder(self._names)
        self._paths: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._exits = ExitStack()
        self._thread = get_ident()
        self._depth = 0
        self._begin_s = 0.0
        self._seconds = 0.0

    def __enter__(self) -> Self:
        """Begin."""
        hooks = torch.nn.modules.module
        for handle in (
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ):
            self._exits.callback(handle.remove)
        self._exits.enter_context(self._recorder)
        return self

    def __exit__(self, *_error: object) -> None:
        """End."""
        self._exits.close()

    @property
    def collected(self) -> Collected:
        """Return the products of all calls."""
        products_s = sum(one.seconds for one in self._recorder.seen.values())
        return _collected(self._recorder, max(self._seconds, products_s, 1e-9))

    def _enter_module(self, module: Any, _inputs: object) -> None:  # noqa: ANN401 - a module
        if get_ident() != self._thread:
            return
        if not self._depth:
            self._begin_s = perf_counter()
        self._depth += 1
        if module not in self._paths:
            root = type(module).__name__
            for name, one in module.named_modules():
                self._paths[one] = f"{root}.{name}" if name else root
        own = (module.named_buffers(recurse=False), module.named_parameters(recurse=False))
        for name, parameter in chain(*own):
            self._names.add(parameter, f"{self._paths[module]}.{name}")

    def _leave_module(self, _module: object, _inputs: object, _output: object) -> None:
        if get_ident() != self._thread:
            return
        self._depth -= 1
        if not self._depth:
            self._seconds += perf_counter() - self._begin_s
