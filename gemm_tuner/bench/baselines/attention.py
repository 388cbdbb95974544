"""Attention by libraries: PyTorch's own, and two products with a pass in C between them."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.bench.baselines.baseline import AnyBaseline, Copy, Package, Row
from gemm_tuner.bench.baselines.python_runner import PythonRunner
from gemm_tuner.bench.baselines.torch_steps import (
    Tensor,
    Torch,
    import_torch,
    tensor_of,
    torch_version,
)
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.attention_layer import AttentionLayer
from gemm_tuner.libraries.choose import LibraryLayer
from gemm_tuner.libraries.onednn import installed_onednn
from gemm_tuner.libraries.onednn_layer import OneDnnLayer
from gemm_tuner.libraries.openblas_layer import OpenBlasLayer

_TRIES = 3


class _Composed(AnyBaseline):
    """Two products of a library, with one pass in C over the scores between them."""

    fuses_epilogue = True
    is_of_openmp = True
    implementation = "two products, and a softmax in C"

    def __init__(self, package: str, make: Callable[[Problem, int | None], LibraryLayer]) -> None:
        self.text = package
        self._make = make

    def prepare(self, workload: Workload) -> PythonRunner:
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: the library does not load, or does not compute these products.
        """
        layer = AttentionLayer(
            workload.problem, lambda product: self._make(product, workload.threads)
        )
        self.text = layer.text
        assert workload.v is not None
        read = [workload.v, *workload.operands.values()]

        def make_call(w: NDArray[Any]) -> Callable[[], object]:
            return partial(layer.compute, workload.x, w, workload.y, read, workload.threads)

        return PythonRunner(workload, make_call)


class TorchAttention(AnyBaseline):
    """`scaled_dot_product_attention`: as it chooses or by two products, whichever is faster."""

    fuses_epilogue = True
    preparation_s = 60.0

    def __init__(self) -> None:
        """Find the wheel.

        Raises:
            BaselineMissing: it is not installed.
        """
        self.text = f"torch {torch_version()}"

    def prepare(self, workload: Workload) -> PythonRunner:
        """Return a runner that works on `workload`."""
        torch = import_torch(workload.threads)
        ways = _ways_of(torch, workload)
        times = {name: _least_s(call) for name, call in ways.items()}
        best = min(times, key=times.__getitem__)
        self.implementation = f"scaled_dot_product_attention, {best}"
        y = tensor_of(torch, workload.y)

        def make_call(_w: NDArray[Any]) -> Callable[[], object]:
            y.copy_(ways[best]()[0, 0])  # calls have no y of their own; this one is checked
            return ways[best]

        return PythonRunner(workload, make_call)


def _least_s(call: Callable[[], object]) -> float:
    """Return the least time of a few calls."""
    times = []
    for _turn in range(_TRIES):
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return min(times)


def _ways_of(torch: Torch, workload: Workload) -> dict[str, Callable[[], Tensor]]:
    """Return the calls by its ways; what causal hides is in the mask, made ahead.

    On a CPU the function itself takes the flash kernel; to ask for one, as of two products, costs
    20 us in each call, which is longer than a short call takes.
    """
    problem = workload.problem
    assert workload.v is not None
    arrays = (workload.x, workload.w, workload.v)
    q, k, v = (tensor_of(torch, one)[None, None] for one in arrays)
    scale = float(workload.operands["scale"][0]) if "scale" in workload.operands else 1.0
    # The only row sees all keys.
    hides = workload.rows > 1 and any(step.kind.hides for step in problem.epilogue.steps)
    mask = workload.operands.get("add")
    if mask is not None:
        mask = mask.astype(np.float32)
    is_causal = hides and mask is None and workload.rows == problem.n
    if hides and not is_causal:
        seen = np.tri(workload.rows, problem.n, problem.n - workload.rows, dtype=bool)
        mask = np.where(seen, np.float32(0) if mask is None else mask, np.float32(-np.inf))
    given = {
        "attn_mask": None if mask is None else torch.from_numpy(mask).to(q.dtype),
        "is_causal": is_causal,
        "scale": scale,
    }
    attend = torch.nn.functional.scaled_dot_product_attention

    def by_flash() -> Tensor:
        return attend(q, k, v, **given)

    def by_products() -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return attend(q, k, v, **given)

    return {"flash": by_flash, "math": by_products}


def _of_onednn(_materials: object) -> list[Copy]:
    return [
        Copy(
            package=one.package,
            baseline=_Composed(
                one.package,
                partial(
                    lambda path, problem, threads: OneDnnLayer(problem, threads, path), one.path
                ),
            ),
            start_s=one.start_s,
        )
        for one in installed_onednn()
    ]


def _of_openblas(_materials: object) -> list[Copy]:
    package = _packages_of_openblas()[0].text
    baseline = _Composed(package, lambda problem, _threads: OpenBlasLayer(problem))
    return [Copy(package=package, baseline=baseline)]


def _packages_of_openblas() -> list[Package]:
    return [Package(f"numpy {np.__version__}")]


def _of_torch(_materials: object) -> list[Copy]:
    # It takes two seconds to start, and is raced in the shortest budget too: it is what users call,
    # and compositions take twice as long.
    library = TorchAttention()
    return [Copy(package=library.text, baseline=library)]


def _packages_of_torch() -> list[Package]:
    try:
        return [Package(f"torch {torch_version()}")]
    except BaselineMissing:
        return []


ROWS = tuple(
    Row(
        name=name,
        place=place,
        find=find,
        installed=installed,
        is_raced=True,
        takes_activations=True,
        attends=True,
        attention_alone=True,
        is_usual=False,
    )
    for name, place, find, installed in (
        (
            "onednn-attention",
            20,
            _of_onednn,
            lambda: [Package(one.package, one.start_s) for one in installed_onednn()],
        ),
        ("openblas-attention", 21, _of_openblas, _packages_of_openblas),
        ("torch-attention", 22, _of_torch, _packages_of_torch),
    )
)
