"""Attention by PyTorch's own operator."""

from collections.abc import Callable
from functools import partial
from typing import Any

from numpy.typing import NDArray

from gemm_tuner.bench.baselines.attention_terms import heads_of, terms_of
from gemm_tuner.bench.baselines.baseline import Copy, Package, Row
from gemm_tuner.bench.baselines.python_runner import PythonRunner
from gemm_tuner.bench.baselines.torch_steps import (
    Tensor,
    Torch,
    import_torch,
    load_torch,
    tensor_of,
    torch_version,
)
from gemm_tuner.bench.baselines.ways import BaselineOfWays, Call, threads_to_try, told_threads
from gemm_tuner.bench.workload import Workload
from gemm_tuner.errors import BaselineMissing

_OPERATOR = "scaled_dot_product_attention"
_PRODUCTS = "_scaled_dot_product_attention_math"  # of torch.ops.aten


class TorchAttention(BaselineOfWays):
    """`scaled_dot_product_attention`: by its flash kernel or by two products, as is faster.

    What causal hides is said by a flag or by a mask, and a short call is also tried on one thread.
    """

    def __init__(self) -> None:
        """Find the wheel.

        Raises:
            BaselineMissing: it is not installed.
        """
        super().__init__()
        self.text = f"torch {torch_version()}"

    def preload(self) -> None:
        """Import PyTorch here: that takes two seconds and starts no threads."""
        load_torch()

    def prepare(self, workload: Workload) -> PythonRunner:
        """Return a runner that works on `workload`."""
        torch = import_torch(workload.threads)
        call = self.fastest(workload, _ways_of(torch, workload))
        y = tensor_of(torch, workload.y)

        def make_call(_w: NDArray[Any]) -> Call:
            y.copy_(call()[0, 0])  # type: ignore[index]  # a tensor: calls have no y of their own
            return call

        return PythonRunner(workload, make_call)


def _ways_of(torch: Torch, workload: Workload) -> dict[str, Callable[[], Call]]:
    """Return what makes the calls, by the names of the ways.

    On a CPU the function itself takes the flash kernel. Its two products are called as the operator
    that they are: to ask the function for them costs 20 us in each call.
    """
    assert workload.v is not None
    q, k, v = (tensor_of(torch, one) for one in heads_of(workload.x, workload.w, workload.v))
    terms = terms_of(workload)
    mask = None if terms.mask is None else torch.from_numpy(terms.mask).to(q.dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    multiply = getattr(torch.ops.aten, _PRODUCTS)

    def products(attn_mask: Tensor | None, *, is_causal: bool) -> Tensor:
        return multiply(q, k, v, attn_mask, 0.0, is_causal, None, scale=terms.scale)[0]

    calls: dict[str, Call] = {}
    said = {"": (mask, False)}
    if terms.is_causal:
        said = {"": (None, True), ", causal in a mask": (mask, False)}
    for how, (given, is_causal) in said.items():
        flash = {"attn_mask": given, "is_causal": is_causal, "scale": terms.scale}
        calls[f"{_OPERATOR}, flash{how}"] = partial(attend, q, k, v, **flash)
        calls[f"{_OPERATOR}, math{how}"] = partial(products, given, is_causal=is_causal)
    return {
        told_threads(name, workload, threads): partial(
            _in_threads, torch, call, threads, workload.threads
        )
        for threads in threads_to_try(workload)
        for name, call in calls.items()
    }


def _in_threads(torch: Torch, call: Call, threads: int, others: int) -> Call:
    """Return a call on so many threads, where those of all others are `others`."""
    if threads == others:
        return call

    def run() -> object:
        torch.set_num_threads(threads)
        result = call()
        torch.set_num_threads(others)
        return result

    return run


def _find(_materials: object) -> list[Copy]:
    # It takes two seconds to start, and is raced in the shortest budget too: it is what users call,
    # and compositions take twice as long.
    library = TorchAttention()
    return [Copy(package=library.text, baseline=library)]


def _packages() -> list[Package]:
    try:
        return [Package(f"torch {torch_version()}")]
    except BaselineMissing:
        return []


ROWS = (
    Row(
        name="torch-attention",
        place=23,
        find=_find,
        installed=_packages,
        is_raced=True,
        takes_activations=True,
        attends=True,
        attention_alone=True,
        is_usual=False,
    ),
)
