"""What torch.compile compiles calls tuned kernels: a pass over Inductor's joint graph.

The pass puts `linear(x, pack(w), bias)` in the place of a product with constant weights. Freezing
then folds `pack` away: it runs once, when the model is compiled.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V

from gemm_tuner.domain.rows import Rows
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.layers.background import BackgroundTuning
from gemm_tuner.layers.sources import (
    Source,
    Tune,
    find_or_tell,
    tune_or_tell,
)
from gemm_tuner.layers.wanted import FoundLayer, WantedGroups, WantedLayer, WantedProduct
from gemm_tuner.torch.asking import libraries_of_pytorch, problem_text, without_old_kernels
from gemm_tuner.torch.inductor.activations import (
    Activations,
    activations_of,
    insert_matmul,
    product_of_activations,
)
from gemm_tuner.torch.inductor.attention import Attention, attention_of, insert_attention
from gemm_tuner.torch.inductor.beside_convolution import is_faster_than_convolution
from gemm_tuner.torch.inductor.chains import AnyProduct, OfActivations, chain, steps_of, with_steps
from gemm_tuner.torch.inductor.epilogues import Step, steps_after
from gemm_tuner.torch.inductor.exporting import write_kernels
from gemm_tuner.torch.inductor.folding import fold_channels
from gemm_tuner.torch.inductor.four_bits import without_whole_slices
from gemm_tuner.torch.inductor.graphs import ATTENTION, FAST_PATHS, Graph, Node, is_recorded
from gemm_tuner.torch.inductor.groups import Groups, groups_of_rows, insert_groups
from gemm_tuner.torch.inductor.joining import (
    groups_of,
    is_timed,
    join,
    joined_time,
    name_of,
    sizes_of,
    unlike,
)
from gemm_tuner.torch.inductor.onednn_linear import BY_ONEDNN, compute_by_onednn, is_by_onednn
from gemm_tuner.torch.inductor.products import (
    Product,
    constants_of,
    is_inner,
    module_of,
    products_of,
)
from gemm_tuner.torch.inductor.repeated import as_one_product
from gemm_tuner.torch.inductor.rewriting import insert
from gemm_tuner.torch.operators import OperatorLayer, add_layer
from gemm_tuner.torch.report import LayerReport, Report

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Watched:
    """What a pass has done while it was watched.

    `graphs` are texts, before and after the pass; `layers` are by number, each with the name of the
    one product that it computes.
    """

    graphs: list[tuple[str, str]] = field(default_factory=list)
    layers: dict[int, tuple[str, OperatorLayer]] = field(default_factory=dict)
    reports: list[LayerReport] = field(default_factory=list)


_BY_FAST_PATH = (
    "PyTorch's fast path computes them in one operator; call "
    "torch.backends.mha.set_fastpath_enabled(False) before the model is compiled."
)


class TunedLinears(CustomGraphPass):  # type: ignore[misc]  # without PyTorch, it is Any
    """The pass; `report` tells of every product with constant weights that it has seen."""

    def __init__(
        self,
        source: Source,
        dynamic_rows: Sequence[int | str],
        dynamic_keys: Rows | None,
        tune: Tune,
        budget_s: float,
    ) -> None:
        self._source = source
        self._budget_s = budget_s if tune == "wait" else None
        self._background = BackgroundTuning(source, budget_s) if tune == "background" else None
        self._dynamic_rows = tuple(dynamic_rows)
        self._dynamic_keys = dynamic_keys
        self._found: dict[WantedLayer, FoundLayer] = {}
        self._tuned: set[WantedLayer] = set()
        self._taken: dict[int, OperatorLayer] = {}
        self._reports: list[LayerReport] = []
        self._has_warned = False
        self._watched: Watched | None = None
        self.freezing_before = bool(config.freezing)

    def __deepcopy__(self, _memo: object) -> "TunedLinears":
        """Return this: Inductor copies its settings, and this is one of them."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Return what makes `None`, the setting of a process that has not called `enable`.

        What `torch.compile` returns holds Inductor's settings, and is pickled with them.
        """
        return type(None), ()

    @property
    def report(self) -> Report:
        """Return what became of each product that was compiled since this was enabled."""
        return Report(self._reports)

    @property
    def source(self) -> Source:
        """Return where kernels are asked for."""
        return self._source

    @contextmanager
    def watched(self) -> Iterator[Watched]:
        """Let what is compiled in a `with` block have a layer for each product.

        It is no part of `report`, and `write_kernels` does not write it.
        """
        before = self._reports, self._taken
        self._watched = Watched()
        self._reports, self._taken = self._watched.reports, {}
        try:
            yield self._watched
        finally:
            self._watched = None
            self._reports, self._taken = before

    def uuid(self) -> str:
        """Return a text that stands for every source: Inductor keeps what it compiles.

        With freezing, Inductor looks for a graph that it has compiled after this pass, and the
        number of a layer follows from the bytes of its kernels. Without, the pass changes nothing.
        The number rises when the code that calls them changes.
        """
        return "gemm_tuner.torch 8"

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

    def __call__(self, graph: Graph) -> None:
        """Replace the products that there are kernels for."""
        if self._watched is None:
            self._replace_all(graph)
            return
        before = str(graph)
        self._replace_all(graph)
        self._watched.graphs.append((before, str(graph)))

    def _replace_all(self, graph: Graph) -> None:
        why_left = _why_left(graph)
        if why_left:
            self._leave("(a whole graph)", "all products", why_left)
            return
        self._leave_fast_paths(graph)
        constants = constants_of(graph)
        as_one_product(graph, constants)
        constants = fold_channels(graph, constants)
        without_whole_slices(graph)
        varying = frozenset() if is_inner(graph) else activations_of(graph, constants)
        alike = groups_of(products_of(graph.nodes, constants), constants)
        of_first = {group[0].node: [part.node for part in group] for group in alike}
        joined: set[Node] = set()
        remarks: dict[Node, str] = {}
        is_changed = False
        for node in list(graph.nodes):
            if node in joined:
                continue
            groups = groups_of_rows(node)
            if node in varying or groups is not None:
                of_activations = groups or _of_activations(node)
                is_changed |= of_activations is not None and self._replace(graph, of_activations)
                continue
            # Of the nodes as they are now: what products read may have been replaced meanwhile.
            parts = products_of(of_first.get(node, [node]), constants)
            if len(parts) > 1:
                is_faster, why = self._is_faster_joined(parts)
                remarks |= dict.fromkeys(of_first[node], why)
                if is_faster:
                    joined |= set(of_first[node])
                    parts = [join(graph, parts)]
            if parts:
                is_changed |= self._replace(graph, parts[0], remarks.get(node, ""))
        if is_changed:
            graph.eliminate_dead_code()
            graph.lint()

    def _is_faster_joined(self, parts: Sequence[Product]) -> tuple[bool, str]:
        """Return whether one kernel for all products is faster than what runs for each, and why."""
        wanted, _bounds = self._wanted(parts[0])
        if not wanted.rows:
            return False, ""
        n, k = sizes_of(parts)
        wanted = replace(wanted, n=n, k=k, epilogue=chain(parts[0], ()))
        ways = [self._ways(part) for part in unlike(parts)]
        whole = self._find(wanted, is_first=True) if all(map(is_timed, ways)) else None
        time = joined_time(ways, whole) if whole else None
        names = name_of(parts)
        if time is None:
            lacking = "each of them" if whole is None else problem_text(wanted)
            return False, f"Whether {names} are faster as one is not known: no time of {lacking}."
        is_faster = bool(whole and whole.kernels) and time.is_faster
        return is_faster, f"{names} {'are' if is_faster else 'would be'} one product: {time.text}."

    def _ways(self, part: Product) -> list[FoundLayer]:
        """Return what there is for a product, with the function after it and without."""
        wanted, _bounds = self._wanted(part)
        chains = dict.fromkeys(chain(part, steps) for steps in (steps_after(part.node), ()))
        return [self._find(replace(wanted, epilogue=one), is_first=True) for one in chains]

    def stop_tuning(self) -> None:
        """Tune nothing in the background after what is being tuned."""
        if self._background is not None:
            self._background.stop()

    def _replace(self, graph: Graph, product: AnyProduct, remark: str = "") -> bool:
        """Replace a product, with as many of the steps after it as there are kernels for."""
        wanted, bounds = self._wanted(product)
        why_left = product.why_left
        if not wanted.rows and not why_left:
            why_left = "its rows are known when it runs; give dynamic_rows to say what to ask for."
        if isinstance(wanted.n, torch.SymInt) and not why_left:
            why_left = "its keys are known when it runs; give dynamic_keys, such as '1..4096'."
        steps = steps_of(product)
        if why_left:
            whole = with_steps(wanted, product, steps)
            self._tell(product, whole, [why_left], is_taken=False)
            return False
        reasons: list[str] = []
        fastest: set[str] = set()
        for count in range(len(steps), -1, -1):
            fused = with_steps(wanted, product, steps[:count])
            found = self._find(fused, is_first=count == len(steps))
            if found.kernels:
                layer = self._layer(found, product.name)
                is_slower, why = self._is_slower(product, layer, steps[:count])
                reasons = [] if is_slower else [kernel.reason for kernel in found.kernels]
                reasons += [*found.reasons, why, remark]
                self._tell(product, fused, reasons, is_taken=not is_slower, has_lost=is_slower)
                if is_slower:
                    return False
                self._taken[layer.number] = layer
                self._insert(graph, product, layer, steps[:count], is_whole=layer.holds(*bounds))
                return True
            reasons += found.reasons
            fastest |= set(found.fastest)
        is_replaced = isinstance(product, Product) and is_by_onednn(product, fastest)
        reasons += [remark, BY_ONEDNN if is_replaced else ""]
        whole = with_steps(wanted, product, steps)
        self._tell(product, whole, reasons, is_taken=False, has_lost=bool(fastest))
        if isinstance(product, Product) and is_replaced:
            compute_by_onednn(graph, product)
        return is_replaced

    @staticmethod
    def _insert(
        graph: Graph,
        product: AnyProduct,
        layer: OperatorLayer,
        steps: Sequence[Step],
        *,
        is_whole: bool,
    ) -> None:
        if isinstance(product, Attention):
            insert_attention(graph, product, layer.number)
        elif isinstance(product, Groups):
            insert_groups(graph, product, layer.number)
        elif isinstance(product, Activations):
            insert_matmul(graph, product, layer.number, steps)
        else:
            insert(graph, product, layer, steps, is_whole=is_whole)

    @staticmethod
    def _is_slower(
        product: AnyProduct, layer: OperatorLayer, steps: Sequence[Step]
    ) -> tuple[bool, str]:
        """Return whether a convolution is faster than its patches with a kernel, and why."""
        window = product.window if isinstance(product, Product) else None
        if window is None or window.is_pixel:
            return False, ""
        adds = any(one.name == "add" for one in steps)
        beside = is_faster_than_convolution(product.node, window, layer, adds=adds)
        return not beside.is_faster, beside.reason

    def _layer(self, found: FoundLayer, name: str) -> OperatorLayer:
        if self._watched is None:
            return add_layer(found.kernels)
        layer = add_layer(found.kernels, f"{len(self._watched.layers)} {name}")
        self._watched.layers[layer.number] = name, layer
        return layer

    def _leave_fast_paths(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.target in FAST_PATHS:
                self._leave(module_of(node), "all its products", _BY_FAST_PATH)

    def _leave(self, name: str, problem: str, reason: str) -> None:
        """Tell of what is left before its products are looked at."""
        self._reports.append(
            LayerReport(name=name, problem=problem, rows=(), is_taken=False, reason=reason)
        )
        self._warn(reason)

    def _tell(
        self,
        product: AnyProduct,
        wanted: WantedLayer,
        reasons: Sequence[str],
        *,
        is_taken: bool,
        has_lost: bool = False,
    ) -> None:
        report = LayerReport(
            name=product.name,
            problem=problem_text(wanted, product.batch),
            rows=wanted.rows,
            is_taken=is_taken,
            reason=" ".join(dict.fromkeys(filter(None, reasons))),
        )
        self._reports.append(report)
        if has_lost:  # as it should be: what is faster runs
            _LOG.info("Left to PyTorch: %s", report.text)
        elif not is_taken:
            self._warn(report.reason)

    def _wanted(self, product: AnyProduct) -> tuple[WantedLayer, tuple[int, int]]:
        """Return the layer to ask for, and the least and greatest number of rows."""
        n, k = product.sizes
        rows = product.rows
        asked: tuple[int | str, ...]
        if isinstance(product, Groups):
            bounds = (0, 2**62)
            asked = self._dynamic_rows or product.likely_rows
        elif isinstance(rows, torch.SymInt):
            environment = rows.node.shape_env
            bound = environment.bound_sympy(rows.node.expr)
            bounds = _int_or(bound.lower, 0), _int_or(bound.upper, 2**62)
            example = (int(rows.node.hint),) if rows.node.has_hint() else ()
            asked = self._dynamic_rows or example
        else:
            bounds = (int(rows), int(rows))
            asked = (int(rows),)
        make: Callable[..., WantedLayer] = WantedLayer
        if isinstance(product, OfActivations):
            keys = self._dynamic_keys if isinstance(product, Attention) else None
            least_n = None
            if keys is not None and isinstance(n, torch.SymInt):
                least_n, n = keys.low, keys.high
            kind = WantedGroups if isinstance(product, Groups) else WantedProduct
            make = partial(kind, operation=product.operation, least_n=least_n)
        wanted = make(
            n=n,
            k=k,
            rows=asked,
            dtype=product.types,
            epilogue="none",
            threads=_threads(product),
            w_layout=product.w_layout,
            beside=_beside(product),
        )
        return wanted, bounds

    def _find(self, wanted: WantedLayer, *, is_first: bool) -> FoundLayer:
        """Return the kernels for a layer; of the chains to try, the first is tuned if asked for."""
        if is_first and self._background is not None:
            self._background.add(wanted)
            self._found.pop(wanted, None)  # it may have been tuned since
        elif is_first and self._budget_s is not None and wanted not in self._tuned:
            self._tuned.add(wanted)
            self._found.pop(wanted, None)
            if failure := tune_or_tell(self._source, wanted, self._budget_s):
                self._warn(failure)
        if wanted not in self._found:
            self._found[wanted] = without_old_kernels(find_or_tell(self._source, wanted))
        return self._found[wanted]

    def _warn(self, reason: str) -> None:
        """Say once why a product is left as it is; the report tells of each."""
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning("A product is compiled as it would be without gemm-tuner: %s", reason)


def _why_left(graph: Graph) -> str:
    """Return why all of a graph is left: its weights would be packed at each call."""
    if is_recorded(graph) or torch.is_grad_enabled():
        return "it was compiled for training; for inference, call the model under torch.no_grad()."
    return "" if config.freezing else "it was compiled without freezing, which enable switches on."


def _of_activations(node: Node) -> OfActivations | None:
    return attention_of(node) if node.target is ATTENTION else product_of_activations(node)


def _threads(product: AnyProduct) -> int:
    """Return how many threads share a product: of a batch of activations, each may have its own.

    Libraries deal whole products out too, so that is how both are compared.
    """
    threads: int = torch.get_num_threads()
    if isinstance(product, OfActivations):
        batch = product.batch
        return 1 if isinstance(batch, int) and batch >= threads else threads
    return threads


def _beside(product: AnyProduct) -> tuple[str, ...]:
    """Return the libraries, by name, that compute a product in PyTorch and not elsewhere.

    Inductor packs constant weights for oneDNN instead where rows are not known, or ahead of time.
    A convolution is oneDNN's, and a batch with weights of its own is not packed.
    """
    if not isinstance(product, OfActivations):
        is_packed = not product.is_image and product.batch is None
        if not is_packed or isinstance(product.rows, torch.SymInt) or V.aot_compilation:
            return ()
    return libraries_of_pytorch(product.types)


def _int_or(bound: Any, otherwise: int) -> int:  # noqa: ANN401 - a number of sympy
    return int(bound) if bound.is_Integer else otherwise
