"""What a model computes of one kind, whose kernels are chosen together, inside the model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gemm_tuner.errors import GemmTunerError
from gemm_tuner.layers.sources import Source
from gemm_tuner.layers.wanted import FoundLayer, WantedLayer
from gemm_tuner.torch.asking import problem_text
from gemm_tuner.torch.eager.model_layers import ModelLayer
from gemm_tuner.torch.eager.model_products import ModelProducts
from gemm_tuner.torch.eager.replacement import install, install_products
from gemm_tuner.torch.eager.tuned_linear import restore_layer
from gemm_tuner.torch.eager.tuned_products import TunedProducts, restore_products
from gemm_tuner.torch.operators import OperatorLayer, add_layer


class Kind(Protocol):
    """Modules of a model that compute the same.

    `wanted` are the problems to ask kernels for, none where the modules stay as they are. `ways`
    are the ways to compute them with kernels, `served` the one that `replace` takes, and `way` the
    one in use; None is without.
    """

    layers: Sequence[Any]
    wanted: Sequence[WantedLayer]
    reason: str
    ways: Sequence[Any]
    served: Any
    way: Any
    is_whole: bool  # of the time of a module, what is watched inside it is a part

    def learn(self, source: Source) -> None:
        """Ask a source for the ways to compute these layers."""
        ...

    def use(self, way: Any) -> None:  # noqa: ANN401 - of its kind
        """Let the layers call kernels, or be ordinary ones."""
        ...

    def switch(self, *, is_on: bool) -> None:
        """Let layers that have kernels call them, or not for now; what they packed stays."""
        ...


class LinearKind:
    """Linear layers that compute the same."""

    is_whole = True

    def __init__(
        self, layers: Sequence[ModelLayer], source: Source, why_left: str | None = None
    ) -> None:
        """Take the layers, where kernels come from, and why none are asked for, if so."""
        self.layers: Sequence[ModelLayer] = layers
        wanted = None if why_left else layers[0].wanted
        self.wanted: Sequence[WantedLayer] = [wanted] if wanted else []
        self.reason = layers[0].why_left or why_left or ""
        self.served: OperatorLayer | None = None
        self.ways: Sequence[OperatorLayer] = []
        self.way: OperatorLayer | None = None
        self._source = source

    def learn(self, source: Source) -> None:
        """Ask a source for the ways to compute these layers."""
        try:
            found = source.choices(*self.wanted)
            self.ways = [add_layer(one.kernels) for one in found if one.kernels]
            self.served = self.ways[0] if found and found[0].kernels else None
        except GemmTunerError as error:
            self.reason = str(error)
            return
        self.reason = _reason_of(found)

    def use(self, way: OperatorLayer | None) -> None:
        """Let the layers call kernels, or be ordinary ones."""
        self.way = way
        for one in self.layers:
            restore_layer(one.module)
            if way is not None and self.wanted:
                install(one, self.wanted[0], way, self._source)

    def switch(self, *, is_on: bool) -> None:
        """Let layers that have kernels call them, or not for now; what they packed stays."""
        if self.way is not None:
            for one in self.layers:
                tuned = one.module._tuned.module_class  # noqa: SLF001 - of this package
                one.module.__class__ = tuned if is_on else tuned.plain_class


@dataclass(frozen=True, slots=True)
class ProductsWay:
    """Kernels for some of the products of a module, by their place among them."""

    layers: tuple[tuple[int, OperatorLayer], ...]


class ProductsKind:
    """Modules that compute the same products of two activations, or attention.

    The time of such a module is that of its own code, which looks for its products, too.
    """

    is_whole = False

    def __init__(
        self, layers: Sequence[ModelProducts], source: Source, why_left: str | None = None
    ) -> None:
        """Take the modules, where kernels come from, and why none are asked for, if so."""
        self.layers: Sequence[ModelProducts] = layers
        self.reason = layers[0].why_left or why_left or ""
        self.wanted: Sequence[WantedLayer] = [] if self.reason else layers[0].wanted
        self.served: ProductsWay | None = None
        self.ways: Sequence[ProductsWay] = []
        self.way: ProductsWay | None = None
        self._source = source
        self._installed: list[TunedProducts] = []

    def learn(self, source: Source) -> None:
        """Ask a source for the ways to compute these products."""
        try:
            found = [source.choices(one) for one in self.wanted]
        except GemmTunerError as error:
            self.reason = str(error)
            return
        served = [(place, one[0]) for place, one in enumerate(found) if one and one[0].kernels]
        tried = [served, *_ways_of(found)] if served else [*_ways_of(found)]
        ways = [ProductsWay(tuple((at, add_layer(one.kernels)) for at, one in w)) for w in tried]
        self.ways = list(dict.fromkeys(ways))
        self.served = self.ways[0] if served else None
        reasons = dict.fromkeys(filter(None, map(_reason_of, found)))
        self.reason = " ".join(reasons)

    def use(self, way: ProductsWay | None) -> None:
        """Let the modules call kernels, or compute their products themselves."""
        self.way = way
        self._installed = []
        for one in self.layers:
            restore_products(one.module)
            if way is not None:
                layers = [layer for _place, layer in way.layers]
                self._installed.append(install_products(one, layers, self._source))

    def switch(self, *, is_on: bool) -> None:
        """Let modules that have kernels call them, or not for now."""
        for one in self._installed:
            restore_products(one.module)
            if is_on:
                vars(one.module)["forward"] = one

    def taken_of(self, way: ProductsWay) -> str:
        """Return which products have kernels, in words; nothing if all have."""
        if len(way.layers) == len(self.wanted):
            return ""
        names = [problem_text(self.wanted[place]) for place, _layer in way.layers]
        return f"of {len(self.wanted)} products, {' and '.join(names)} alone: "


def _ways_of(
    found: Sequence[Sequence[FoundLayer]],
) -> Iterator[list[tuple[int, FoundLayer]]]:
    """Yield the best kernels of all products, the next best of each, and each product alone."""
    kernels = [[one for one in ways if one.kernels] for ways in found]
    for number in range(max(map(len, kernels), default=0)):
        yield [(at, own[min(number, len(own) - 1)]) for at, own in enumerate(kernels) if own]
    for at, own in enumerate(kernels):
        if own:
            yield [(at, own[0])]


def _reason_of(found: Sequence[FoundLayer]) -> str:
    """Return the first reason of the ways there are."""
    kernels = [kernel for one in found for kernel in one.kernels[:1]]
    reasons = [reason for one in found for reason in one.reasons]
    return " ".join([*reasons, *(one.reason for one in kernels)][:1])
