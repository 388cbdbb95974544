"""What torch.compile compiles calls tuned kernels: a pass over Inductor's joint graph.

The pass puts `linear(x, pack(w), bias)` in the place of a product with constant weights. Freezing
then folds `pack` away: it runs once, when the model is compiled.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from gemm_tuner.domain.problem import Rows
from gemm_tuner.errors import GemmTunerError, InvalidSetting
from gemm_tuner.torch.epilogues import Step, steps_after
from gemm_tuner.torch.exporting import write_kernels
from gemm_tuner.torch.operators import TYPES, OperatorLayer, add_layer, library
from gemm_tuner.torch.report import LayerReport, Report
from gemm_tuner.torch.sources import AnySource, FoundLayer, Source, WantedLayer, open_source

_LOG = logging.getLogger(__name__)
_ATEN = torch.ops.aten
_CASTS = (torch.ops.prims.convert_element_type.default, _ATEN._to_copy.default)  # noqa: SLF001 - its name
_TRANSPOSES = (_ATEN.permute.default, _ATEN.t.default, _ATEN.transpose.int)

# How Dynamo writes the model at the head of a path.
_ROOT = re.compile(r"^L\['\w+'\]\.?")

Node = Any  # torch.fx.Node


class TunedLinears(CustomGraphPass):  # type: ignore[misc]  # without PyTorch, it is Any
    """The pass; `report` tells of every product with constant weights that it has seen."""

    def __init__(
        self, source: Source, dynamic_rows: Sequence[int | str], budget_s: float | None
    ) -> None:
        self._source = source
        self._budget_s = budget_s
        self._dynamic_rows = tuple(dynamic_rows)
        self._found: dict[WantedLayer, FoundLayer] = {}
        self._tuned: set[WantedLayer] = set()
        self._taken: dict[int, OperatorLayer] = {}
        self._reports: list[LayerReport] = []
        self._has_warned = False
        self.freezing_before = bool(config.freezing)

    def __deepcopy__(self, _memo: object) -> "TunedLinears":
        """Return this: Inductor copies its settings, and this is one of them."""
        return self

    @property
    def report(self) -> Report:
        """Return what became of each product that was compiled since this was enabled."""
        return Report(self._reports)

    def uuid(self) -> str:
        """Return a text that stands for every source: Inductor keeps what it compiles.

        With freezing, Inductor looks for a graph that it has compiled after this pass, and the
        number of a layer follows from the bytes of its kernels. Without, the pass changes nothing.
        """
        return "gemm_tuner.torch"

    def write_kernels(self, folder: str | Path) -> Path:
        """Write the kernels of what was compiled since this was enabled, and the operators.

        A model that was compiled ahead of time (`torch._inductor.aoti_compile_and_package`) runs in
        a process without gemm-tuner and without Python that has loaded the library whose path this
        returns; the folder may be moved as a whole. In Python, `load_kernels` reads it.

        Raises:
            InvalidSetting: nothing that was compiled since calls a kernel.
            StoreFailed: the folder cannot be written.
        """
        if not self._taken:
            raise InvalidSetting(
                "no kernel is in what was compiled, so none is written; the report says why. "
                f"{self.report}"
            )
        return write_kernels(Path(folder), self._taken.values())

    def __call__(self, graph: Any) -> None:  # noqa: ANN401 - torch.fx.Graph
        """Replace the products that there are kernels for."""
        if not config.freezing or torch.is_grad_enabled():
            # Weights are not constants then: they would be packed at each call.
            self._warn("it was not compiled under torch.no_grad(), or without freezing.")
            return
        constants = _constants(graph)
        is_changed = False
        for node in list(graph.nodes):
            product = _product(node, constants)
            if product is not None:
                is_changed |= self._replace(graph, node, product)
        if is_changed:
            graph.eliminate_dead_code()
            graph.lint()

    def _replace(self, graph: Any, node: Node, product: "_Product") -> bool:  # noqa: ANN401
        """Replace a product, with as many of the steps after it as there are kernels for."""
        wanted, bounds = self._wanted(product)
        if not wanted.rows:
            reason = "its rows are known when it runs; give dynamic_rows to say what to ask for."
            self._tell(node, wanted, [reason], is_taken=False)
            return False
        steps = steps_after(node)
        reasons: list[str] = []
        for count in range(len(steps), -1, -1):
            fused = replace(wanted, epilogue=_chain(product, steps[:count]))
            found = self._find(fused, is_first=count == len(steps))
            if found.kernels:
                layer = add_layer(found.kernels)
                reasons = [kernel.reason for kernel in found.kernels]
                self._tell(node, fused, [*reasons, *found.reasons], is_taken=True)
                self._taken[layer.number] = layer
                is_whole = layer.holds(*bounds)
                _insert(graph, node, product, layer, steps[:count], is_whole=is_whole)
                return True
            reasons += found.reasons
        self._tell(node, replace(wanted, epilogue=_chain(product, steps)), reasons, is_taken=False)
        return False

    def _tell(
        self, node: Node, wanted: WantedLayer, reasons: Sequence[str], *, is_taken: bool
    ) -> None:
        rows = ",".join(map(str, wanted.rows))
        report = LayerReport(
            name=_module_of(node),
            problem=f"{wanted.dtype} {rows}x{wanted.n}x{wanted.k} {wanted.epilogue}",
            rows=wanted.rows,
            is_taken=is_taken,
            reason=" ".join(dict.fromkeys(reasons)),
        )
        self._reports.append(report)
        if not is_taken:
            self._warn(report.reason)

    def _wanted(self, product: "_Product") -> tuple[WantedLayer, tuple[int, int]]:
        """Return the layer to ask for, and the least and greatest number of rows."""
        n, k = product.sizes
        rows = product.x.meta["val"].shape[0]
        asked: tuple[int | str, ...]
        if isinstance(rows, torch.SymInt):
            environment = rows.node.shape_env
            bound = environment.bound_sympy(rows.node.expr)
            bounds = _int_or(bound.lower, 0), _int_or(bound.upper, 2**62)
            example = (int(rows.node.hint),) if rows.node.has_hint() else ()
            asked = self._dynamic_rows or example
        else:
            bounds = (int(rows), int(rows))
            asked = (int(rows),)
        wanted = WantedLayer(
            n=int(n),
            k=int(k),
            rows=asked,
            dtype=TYPES[product.x.meta["val"].dtype],
            epilogue="none",
            threads=torch.get_num_threads(),
        )
        return wanted, bounds

    def _find(self, wanted: WantedLayer, *, is_first: bool) -> FoundLayer:
        """Return the kernels for a layer; of the chains to try, the first is tuned if asked for."""
        if is_first and self._budget_s is not None and wanted not in self._tuned:
            self._tuned.add(wanted)
            self._found.pop(wanted, None)
            try:
                self._source.tune(wanted, self._budget_s)
            except GemmTunerError as error:
                self._warn(str(error))
        if wanted not in self._found:
            try:
                self._found[wanted] = self._source.find(wanted)
            except GemmTunerError as error:
                self._found[wanted] = FoundLayer(kernels=(), reasons=(str(error),))
        return self._found[wanted]

    def _warn(self, reason: str) -> None:
        """Say once why a product is left as it is; the report tells of each."""
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning("A product is compiled as it would be without gemm-tuner: %s", reason)


@dataclass(frozen=True, slots=True)
class _Product:
    """A product with constant weights: y (rows, n) = x (rows, k) @ w.T + bias.

    The node of the weights is w (n, k), or (k, n) where `is_transposed`.
    """

    x: Node
    w: Node
    bias: Node | None
    is_transposed: bool

    @property
    def sizes(self) -> tuple[int, int]:
        """Return n and k."""
        first, second = self.w.meta["val"].shape
        return (second, first) if self.is_transposed else (first, second)


def _chain(product: _Product, steps: Sequence[Step]) -> str:
    """Return the text of an epilogue."""
    bias = [] if product.bias is None else ["bias"]
    return "+".join([*bias, *(step.name for step in steps)]) or "none"


def _module_of(node: Node) -> str:
    """Return the path of the module that a node comes from, or the name of the node."""
    modules = list(node.meta.get("nn_module_stack", {}).values())
    path = _ROOT.sub("", str(modules[-1][0])) if modules else ""
    return path or str(node.name)


def _product(node: Node, constants: frozenset[Node]) -> _Product | None:
    """Return the product that a node computes, if kernels could."""
    if node.target is _ATEN.addmm.default and not node.kwargs:
        bias, x, w_t = node.args
    elif node.target is _ATEN.mm.default:
        (x, w_t), bias = node.args, None
    else:
        return None
    w = _untransposed(w_t)
    product = _Product(x, w_t if w is None else w, bias, is_transposed=w is None)
    if not _is_constant(product.w, constants):
        return None
    return product if _can_be_read(product) else None


def _can_be_read(product: _Product) -> bool:
    """Return whether kernels read arrays of these types and shapes."""
    arrays = (product.x, product.w, product.bias)
    values = [one.meta.get("val") for one in arrays if one is not None]
    if any(type(one).__name__ != "FakeTensor" for one in values):
        return False
    types = {one.dtype for one in values}
    if (
        len(types) != 1
        or not types <= set(TYPES)
        or any(one.device.type != "cpu" for one in values)
    ):
        return False
    rows, sizes = values[0].shape[0], (*product.sizes, values[0].shape[1])
    if any(isinstance(one, torch.SymInt) or one == 0 for one in sizes):
        return False
    is_vector = product.bias is None or tuple(values[2].shape) == sizes[:1]
    return is_vector and (isinstance(rows, torch.SymInt) or rows > 0)


def _untransposed(node: Node) -> Node | None:
    """Return w (n, k) of a node that is w.T, or None."""
    if node.op != "call_function" or node.target not in _TRANSPOSES:
        return None
    order = list(node.args[1:])
    if node.target is _ATEN.permute.default and list(node.args[1]) != [1, 0]:
        return None
    if node.target is _ATEN.transpose.int and {one % 2 for one in order} != {0, 1}:
        return None
    return node.args[0]


def _is_constant(node: Node, constants: frozenset[Node]) -> bool:
    while node.op == "call_function" and node.target in _CASTS:
        node = node.args[0]
    return node in constants


def _constants(graph: Any) -> frozenset[Node]:  # noqa: ANN401 - torch.fx.Graph
    """Return the nodes that freezing makes constants: the parameters that nothing changes."""
    constants = set(graph.find_nodes(op="get_attr"))
    context = torch._guards.TracingContext.try_get()  # noqa: SLF001 - as freezing itself does
    if context is None or not context.params_flat_unwrap_subclasses or context.fw_metadata is None:
        return frozenset(constants)
    metadata = context.fw_metadata
    placeholders = graph.find_nodes(op="placeholder")
    if len(placeholders) != len(metadata.input_info):
        return frozenset(constants)  # the graph of a branch or a loop: freezing leaves it
    changed = {place for place, one in enumerate(metadata.input_info) if one.mutates_data} | {
        one.base_idx for one in metadata.output_info if one.base_idx is not None
    }
    parameters = context.params_flat_unwrap_subclasses
    return frozenset(
        constants
        | {
            node
            for place, (node, _one) in enumerate(zip(placeholders, parameters, strict=False))
            if place not in changed
        }
    )


def _insert(
    graph: Any,  # noqa: ANN401 - torch.fx.Graph
    node: Node,
    product: _Product,
    layer: OperatorLayer,
    steps: Sequence[Step],
    *,
    is_whole: bool,
) -> None:
    """Put the operators in the place of a product and the steps after it.

    The plain weights stay if there are rows that no kernel is for.
    """
    ops = torch.ops.gemm_tuner
    last = steps[-1].result if steps else node
    others = [step.other for step in steps if step.other is not None]
    with graph.inserting_before(last):
        w = product.w
        if product.is_transposed:
            w = _call(graph, _ATEN.permute.default, (w, [1, 0]))
        packed = _call(graph, ops.pack.default, (w, layer.packed_bytes, layer.number))
        other = (
            _call(graph, _ATEN.reshape.default, (others[0], [-1, layer.problem.n]))
            if others
            else None
        )
        arguments = [product.x, packed, product.bias, layer.number, other]
        if not is_whole:
            arguments.append(w)
        elif other is None:
            arguments.pop()
        y = _call(graph, ops.linear.default, tuple(arguments))
        if steps and steps[-1].view is not None:
            y = _call(graph, _ATEN.reshape.default, (y, steps[-1].view.args[1]))
    last.replace_all_uses_with(y)
    graph.erase_node(last)


def _call(graph: Any, target: Any, arguments: tuple[Any, ...]) -> Node:  # noqa: ANN401
    node = graph.call_function(target, arguments)
    node.meta["val"] = target(*torch.fx.node.map_arg(arguments, lambda one: one.meta["val"]))
    return node


def _int_or(bound: Any, otherwise: int) -> int:  # noqa: ANN401 - a number of sympy
    return int(bound) if bound.is_Integer else otherwise


def enable(
    source: AnySource = None,
    *,
    dynamic_rows: Sequence[int | str] = (),
    tune: Literal["never", "wait"] = "never",
    budget_s: float = 10.0,
) -> TunedLinears:
    """Let what torch.compile compiles from now on call tuned kernels, where one is known.

    It switches Inductor's freezing on: weights become constants of what is compiled. Inference runs
    under `torch.no_grad()`; what is compiled for training stays as it was. `disable` ends it.

    Args:
        source: where kernels come from: a `Client`, the address of a service, the URL of a
            database, the path of a lock file; by default the user's own database.
        dynamic_rows: the numbers of rows to ask for where they are not known when a model is
            compiled, such as `[1, "2..64"]`; by default those of the example.
        tune: `never`, or `wait` to tune what is missing in the database while a model is compiled.
        budget_s: the time to tune one layer, in seconds.

    Raises:
        InvalidInput: an argument is none that is known, or another pass is in the place of this.
        GemmTunerError: the source cannot be opened, or the operators cannot be built.
    """
    if tune not in ("never", "wait"):
        raise InvalidSetting(f"tune = {tune!r} is not known; use 'never' or 'wait'.")
    if isinstance(dynamic_rows, str):
        raise InvalidSetting(f"dynamic_rows is {dynamic_rows!r}; give a list, [{dynamic_rows!r}].")
    for rows in dynamic_rows:
        Rows.parse(str(rows))
    before = config.joint_custom_pre_pass
    if before is not None and not isinstance(before, TunedLinears):
        raise InvalidSetting(
            "torch._inductor.config.joint_custom_pre_pass holds another pass; "
            "take it out before gemm_tuner.torch.enable."
        )
    library()
    opened = open_source(source)
    disable()
    tuned = TunedLinears(opened, dynamic_rows, budget_s if tune == "wait" else None)
    config.joint_custom_pre_pass = tuned
    config.freezing = True
    return tuned


def disable() -> None:
    """Let torch.compile compile as it did before `enable`."""
    tuned = config.joint_custom_pre_pass
    if isinstance(tuned, TunedLinears):
        config.joint_custom_pre_pass = None
        config.freezing = tuned.freezing_before
