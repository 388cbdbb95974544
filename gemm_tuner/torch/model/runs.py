"""Runs of a model that is compared with itself: with kernels, and as PyTorch computes it."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch._inductor import config
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gemm_tuner.abi import ArgsStruct, WeightsStruct
from gemm_tuner.arrays.dlpack import as_array
from gemm_tuner.arrays.numpy_types import NUMPY_TYPES
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.layers.sources import Source, open_source
from gemm_tuner.torch.calls import Call, is_compiled
from gemm_tuner.torch.eager.tuned_linear import TunedModule
from gemm_tuner.torch.eager.tuned_products import TunedProducts
from gemm_tuner.torch.inductor.compiling import TunedLinears, Watched
from gemm_tuner.torch.model.judging import KnownLayer, array_at
from gemm_tuner.torch.model.watching import OnCall, watching


class _Passing(TorchDispatchMode):  # type: ignore[misc]  # without PyTorch, it is Any
    """Lets every operator run as it is: tuned layers compute as PyTorch does below any mode."""

    def __torch_dispatch__(
        self,
        function: Any,  # noqa: ANN401 - an operator
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what it returns
        return function(*args, **(kwargs or {}))


class Runs:
    """Runs of a model for some calls; each returns the tensors of all outputs.

    What is compiled in a `with` block has a layer for each product; it is compiled again after it.
    """

    def __init__(self, model: Any, calls: Sequence[Call]) -> None:  # noqa: ANN401 - a module
        """Take a model as it is.

        Raises:
            InvalidSetting: it calls no kernel, whatever it is called with.
        """
        enabled = config.joint_custom_pre_pass
        self.tuned_pass = enabled if isinstance(enabled, TunedLinears) else None
        self.layers = [
            (name, one) for name, one in model.named_modules() if isinstance(one, TunedModule)
        ]
        forwards = (vars(one).get("forward") for one in model.modules())
        self.products = [one for one in forwards if isinstance(one, TunedProducts)]
        is_replaced = bool(self.layers or self.products)
        if not is_replaced and self.tuned_pass is None:
            raise InvalidSetting(
                "no layer of the model calls a tuned kernel; call gemm_tuner.torch.replace or "
                "tune_model on it, or gemm_tuner.torch.enable before it is compiled."
            )
        self.graphs = Watched()
        self._calls = calls
        self._given = model
        self._is_given_compiled = any(is_compiled(one) for one in model.modules())
        self.is_compiled = self._is_given_compiled or not is_replaced
        self._is_watched = False
        is_own = self.is_compiled and not self._is_given_compiled
        self._model = torch.compile(model) if is_own else model
        self._weights: dict[int, list[NDArray[Any]]] = {}
        self._groups: dict[int, dict[str, NDArray[np.float32]]] = {}
        self._named: dict[str, list[NDArray[Any]]] = {}
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        """Begin."""
        self._exits.enter_context(torch.no_grad())
        return self

    def __exit__(self, *_error: object) -> None:
        """End: what was compiled for this is not kept."""
        self._exits.close()
        self._forget()

    def plain(self) -> list[Any]:
        """Return what PyTorch computes, in eager mode."""
        with torch.compiler.set_stance("force_eager"), _Passing():
            return self._outputs(self._given)

    def as_given(self) -> list[Any] | None:
        """Return what a model computes that was compiled earlier, None if it was not."""
        return self._outputs(self._model) if self._is_given_compiled else None

    def watched(self, on_call: OnCall) -> list[Any]:
        """Return what the model computes, compiled anew, while each call of a kernel is seen."""
        if self.tuned_pass is not None and not self._is_watched:
            self._forget()
            self.graphs = self._exits.enter_context(self.tuned_pass.watched())
            self._is_watched = True
        with watching(on_call, self._pack):
            return self._outputs(self._model)

    def without_pass(self) -> list[Any] | None:
        """Return what the model computes that is compiled without kernels, None in eager mode."""
        if not self.is_compiled:
            return None
        self._forget()
        with config.patch(joint_custom_pre_pass=None):
            return self._outputs(self._model)

    def known(self, number: int, args: ArgsStruct) -> KnownLayer | None:
        """Return the layer that a call is of, None if it is none of this model."""
        if number in self.graphs.layers:
            name, layer = self.graphs.layers[number]
            if not layer.problem.operation.packs_ahead:
                return KnownLayer(name=name, layer=layer, w=[])
            w = self._weights.get(number, [])[: args.batch]
            groups = self._groups.get(number, {})
            name = self._unlike(name, number) if w else name
            return KnownLayer(name=name, layer=layer, w=w, **groups) if w else None
        for name, module in self.layers:
            tuned = module._tuned  # noqa: SLF001 - of this package
            packed = tuned.packed and tuned.packed.result
            placed = tuned.layer and tuned.layer.kernel_for(args.m)
            if packed and placed and packed[0].data_ptr() + placed.packed_offset == args.packed_w:
                elements, *groups = tuned.elements_of(module.weight)
                scales, zero_points = (*groups, None, None)[:2]
                return KnownLayer(
                    name=name,
                    layer=tuned.layer,
                    w=[_array(elements)],
                    scales=None if scales is None else _array(scales),
                    zero_points=None if zero_points is None else _array(zero_points),
                )
        for tuned in self.products:
            if tuned.layers and number in tuned.layers:
                return KnownLayer(name=tuned.name, layer=tuned.layers[number], w=[])
        return None

    def _pack(self, number: int, weights: WeightsStruct) -> None:
        """Keep the weights that a compiled product reads."""
        if number in self.graphs.layers:
            problem = self.graphs.layers[number][1].problem
            elements_per_byte = 8 // min(8, problem.types.w.size_bits)
            w = array_at(
                weights.elements,
                (problem.n, -(-problem.k // elements_per_byte)),
                weights.leading_dimension // elements_per_byte,
                NUMPY_TYPES[problem.types.w],
            )
            self._weights.setdefault(number, []).append(w.copy())
            shape, floats = (problem.n, problem.w_groups), np.dtype(np.float32)
            addresses = {"scales": weights.scales, "zero_points": weights.float_zero_points}
            self._groups[number] = {
                name: array_at(address, shape, problem.w_groups, floats).copy()
                for name, address in addresses.items()
                if address
            }

    def sources(self) -> list[Source]:
        """Return where its kernels come from."""
        texts = dict.fromkeys(
            [
                *(module._tuned.source for _name, module in self.layers),  # noqa: SLF001
                *(one.source for one in self.products),
            ]
        )
        own = [self.tuned_pass.source] if self.tuned_pass is not None else []
        return own + [open_source(one) for one in texts if one is not None]

    def _unlike(self, name: str, number: int) -> str:
        """Return the name of a product, with a number where one of other weights has it too.

        In a module that is compiled by itself, a product has no path.
        """
        alike = self._named.setdefault(name, [])
        own = self._weights[number][0]
        place = next((at for at, one in enumerate(alike) if np.array_equal(one, own)), len(alike))
        if place == len(alike):
            alike.append(own)
        return f"{name} ({place + 1})" if place else name

    def _outputs(self, model: Any) -> list[Any]:  # noqa: ANN401 - a module
        """Call a model, and return copies of the tensors that it returns.

        Raises:
            InvalidSetting: it returns none, or one that cannot be compared.
        """
        tensors: list[Any] = []
        for call in self._calls:
            output = call.copied().on(model)
            found = [one for one in _pytree.tree_leaves(output) if isinstance(one, torch.Tensor)]
            if not found:
                raise InvalidSetting(
                    f"the model returns a {type(output).__name__}, in which no tensor is found; "
                    "give one that returns a tensor, or a tuple, list or dict of tensors."
                )
            for one in found:
                if one.device.type != "cpu" or one.layout is not torch.strided or one.is_nested:
                    raise InvalidSetting(
                        f"the model returns a tensor on {one.device} of the layout {one.layout}, "
                        "which is not compared; give one that returns dense tensors on the CPU."
                    )
            tensors += [one.detach().clone() for one in found]
        return tensors

    def _forget(self) -> None:
        """Let what was compiled be compiled again."""
        if self.is_compiled:
            torch._dynamo.reset()  # noqa: SLF001 - so called


def _array(tensor: Any) -> NDArray[Any]:  # noqa: ANN401 - of PyTorch
    return np.asarray(as_array("w", tensor))
