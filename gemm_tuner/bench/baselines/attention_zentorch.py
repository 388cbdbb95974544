"""Attention by zentorch, which has kernels of its own for AVX-512."""

from functools import partial

from gemm_tuner.bench.baselines.attention_terms import heads_of, terms_of
from gemm_tuner.bench.baselines.baseline import AnyBaseline, Copy, Package, Row
from gemm_tuner.bench.baselines.python_runner import PythonRunner
from gemm_tuner.bench.baselines.torch_steps import tensor_of
from gemm_tuner.bench.baselines.zentorch import (
    WHEEL,
    checked_call,
    import_zentorch,
    zentorch_text,
)
from gemm_tuner.bench.workload import Workload
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.wheels import installed_wheels
from gemm_tuner.machine.detect import detect_cpu

_START_S = 4.0


class ZentorchAttention(AnyBaseline):
    """`zentorch_sdpa`, which writes to y."""

    fuses_epilogue = True
    preparation_s = 120.0
    implementation = "zentorch_sdpa"

    def __init__(self) -> None:
        """Find the wheel.

        Raises:
            BaselineMissing: it, or PyTorch, is not installed.
        """
        self.text = zentorch_text()

    def check_problem(self, problem: Problem) -> None:
        """Refuse what PyTorch would compute.

        Raises:
            BaselineMissing: this CPU has no AVX-512.
        """
        if not _has_kernels():
            raise BaselineMissing(
                f"zentorch computes {problem.text} by the kernel of PyTorch on a CPU without "
                "AVX-512; choose torch-attention."
            )

    def prepare(self, workload: Workload) -> PythonRunner:
        """Return a runner that works on `workload`.

        Raises:
            BaselineMissing: the package cannot be loaded, or refuses the problem.
        """
        torch = import_zentorch(workload.threads)
        terms = terms_of(workload)
        assert workload.v is not None
        q, k, v, y = (
            tensor_of(torch, one)
            for one in heads_of(workload.x, workload.w, workload.v, workload.y)
        )
        mask = None
        if terms.mask is not None and not terms.is_causal:
            mask = torch.from_numpy(terms.mask).to(q.dtype)[None, None]
        call = partial(
            torch.ops.zentorch.zentorch_sdpa.out,
            *(q, k, v, 0.0, terms.is_causal),
            attn_mask=mask,
            scale=terms.scale,
            out=y,
        )
        checked = checked_call(call, workload)
        return PythonRunner(workload, lambda _w: checked)


def _has_kernels() -> bool:
    return IsaFeature.AVX512F in detect_cpu().isa


def _packages() -> list[Package]:
    return [Package(text, _START_S) for text in installed_wheels(WHEEL) if _has_kernels()]


def _find(_materials: object) -> list[Copy]:
    library = ZentorchAttention()
    return [Copy(package=library.text, baseline=library, start_s=_START_S)]


ROWS = (
    Row(
        name="zentorch-attention",
        place=24,
        find=_find,
        installed=_packages,
        is_raced=True,
        takes_activations=True,
        attends=True,
        attention_alone=True,
        is_usual=False,
    ),
)
