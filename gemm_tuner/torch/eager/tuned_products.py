"""A module whose products and attention call tuned kernels, in eager mode."""

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from inspect import Signature, signature
from types import CodeType, MethodType
from typing import Any

import torch
from torch._jit_internal import FunctionModifiers
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gemm_tuner.errors import GemmTunerError
from gemm_tuner.layers.sources import open_source
from gemm_tuner.layers.wanted import WantedProduct
from gemm_tuner.torch.eager.tuned_linear import is_followed, is_transformed, no_script
from gemm_tuner.torch.operators import OperatorLayer, add_layer

_LOG = logging.getLogger(__name__)

BATCHED = (torch.bmm, torch.Tensor.bmm)
PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, *BATCHED)
ATTENTION = functional.scaled_dot_product_attention
GROUPED = torch._grouped_mm  # noqa: SLF001 - what `functional.grouped_mm` calls
_OF_GROUPED = ("input", "mat2", "offs", "bias", "out_dtype")


class _Taking(TorchFunctionMode):  # type: ignore[misc]  # without PyTorch, it is Any
    """Lets products and attention that are called from Python call kernels where one takes them."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self._numbers = numbers

    def __torch_function__(
        self,
        function: Any,  # noqa: ANN401 - a function of PyTorch
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what it returns
        given = kwargs or {}
        if not types:  # plain tensors alone
            if function is ATTENTION:
                return _attend(self._numbers, *args, **given)
            if function in PRODUCTS and len(args) == 2 and not given:
                is_bmm = function in BATCHED
                return torch.ops.gemm_tuner.matmul_or_plain.default(*args, self._numbers, is_bmm)
            if function is GROUPED and (groups := groups_of(*args, **given)) is not None:
                return torch.ops.gemm_tuner.grouped_or_plain.default(*groups, self._numbers)
        return function(*args, **given)


def groups_of(*args: Any, **given: Any) -> tuple[Any, Any, Any] | None:  # noqa: ANN401 - of a call
    """Return x, w and where each group of rows ends; None where a call is of more than these."""
    named = dict(zip(_OF_GROUPED, args, strict=False)) | given
    x, w, ends, *more = (named.pop(name, None) for name in _OF_GROUPED)
    is_more = named or any(one is not None for one in more)
    return None if is_more or any(one is None for one in (x, w, ends)) else (x, w, ends)


def _attend(  # noqa: PLR0917 - as in PyTorch
    numbers: list[int],
    query: Any,  # noqa: ANN401 - a tensor
    key: Any,  # noqa: ANN401 - a tensor
    value: Any,  # noqa: ANN401 - a tensor
    attn_mask: Any = None,  # noqa: ANN401 - a tensor
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - as in PyTorch
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:  # noqa: ANN401 - a tensor
    return torch.ops.gemm_tuner.attention_or_plain.default(
        query, key, value, numbers, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )


class TunedProducts:
    """The `forward` of a module whose products and attention call kernels.

    They are products of two activations, and those of groups of rows, as of experts.

    What is recorded for a derivative, traced, transformed, exported, compiled or under autocast is
    computed as without it, and so is what no kernel is for. `wanted` are the products.
    """

    def __init__(
        self,
        module: Any,  # noqa: ANN401 - a module
        name: str,
        wanted: Sequence[WantedProduct],
        source: str | None,
        layers: Sequence[OperatorLayer],
    ) -> None:
        """Take the module and its name, the products, where they were asked for, and kernels."""
        self.module = module
        self.name = name
        self.wanted = tuple(wanted)
        self.source = source
        self._use(layers)

    def _use(self, layers: Sequence[OperatorLayer]) -> None:
        """Use kernels: each module has layers of its own, so that calls tell whose they are."""
        own = [add_layer([one.kernel for one in each.kernels], self.name) for each in layers]
        self.layers: dict[int, OperatorLayer] | None = {one.number: one for one in own}
        self._numbers = list(self.layers)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - of the user
        """Call the module."""
        forward: Callable[..., Any] = type(self.module).forward
        if is_followed() or is_transformed():
            return forward(self.module, *arguments, **keywords)
        if self.layers is None:
            self._use(self._found())
        with _Taking(self._numbers):
            return forward(self.module, *arguments, **keywords)

    @property
    def __signature__(self) -> Signature:
        """Return the signature of the module's own `forward`, as those who look for it expect."""
        return signature(MethodType(type(self.module).forward, self.module))

    @property
    def __code__(self) -> CodeType:
        """Return the code of the module's own `forward`, which `torch.export` reads."""
        code: CodeType = type(self.module).forward.__code__
        return code

    @property
    def _torchscript_modifier(self) -> object:
        """Refuse `torch.jit.script`, which asks every `forward` for this; so does a trace.

        Raises:
            InvalidSetting: nothing is being traced.
        """
        if torch.jit._trace._trace_module_map is not None:  # noqa: SLF001 - a trace begins
            return FunctionModifiers.DEFAULT
        name = f" {self.name!r}" if self.name else ""
        raise no_script(f"{type(self.module).__name__}{name}")

    def __getstate__(self) -> dict[str, Any]:
        """Return what asks for the kernels again in the process where it is unpickled."""
        return {name: getattr(self, name) for name in ("module", "name", "wanted", "source")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Take what was pickled."""
        self.__dict__.update(state)
        self.layers = None
        install_copying(type(self.module))

    def __deepcopy__(self, memo: dict[int, Any]) -> "TunedProducts":
        """Return the same kernels for a copy of the module."""
        memo[id(self)] = copied = self._of(None)
        copied.module = deepcopy(self.module, memo)
        return copied

    def _of(self, module: Any) -> "TunedProducts":  # noqa: ANN401 - a module
        """Return the same kernels for another module."""
        other = object.__new__(TunedProducts)
        other.__dict__.update(self.__dict__, module=module)
        return other

    def _found(self) -> list[OperatorLayer]:
        """Return what the source has for the products, none if it cannot be asked."""
        if self.source is None:
            return []
        try:
            source = open_source(self.source)
            found = [source.find(one).kernels for one in self.wanted]
        except GemmTunerError as error:
            _LOG.warning("%s computes as it would without gemm-tuner: %s", self.name, error)
            return []
        return [add_layer(kernels) for kernels in found if kernels]


def install_copying(kind: Any) -> None:  # noqa: ANN401 - a class of modules
    """Let `copy.copy` of modules of a class give each copy a `TunedProducts` of its own.

    A shallow copy shares what the module has: the `forward` around the first one's attributes too.
    """
    own = getattr(kind, "__copy__", _shallow_copy)
    if hasattr(own, "binds_products"):
        return

    def copy_module(module: Any) -> Any:  # noqa: ANN401 - modules
        copied = own(module)
        tuned = vars(copied).get("forward")
        if isinstance(tuned, TunedProducts):
            vars(copied)["forward"] = tuned._of(copied)  # noqa: SLF001 - of this module
        return copied

    copy_module.binds_products = True  # type: ignore[attr-defined]
    kind.__copy__ = copy_module


def _shallow_copy(module: Any) -> Any:  # noqa: ANN401 - modules
    """Return what `copy.copy` makes of a module whose class does not say how."""
    make, arguments, state = module.__reduce_ex__(4)[:3]
    copied = make(*arguments)
    copied.__setstate__(state)
    return copied


def restore_products(module: Any) -> None:  # noqa: ANN401 - a module
    """Make a module compute its products itself again, if kernels did."""
    if isinstance(vars(module).get("forward"), TunedProducts):
        del vars(module)["forward"]
