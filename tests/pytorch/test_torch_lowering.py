"""The code that Inductor writes for calls of the operators; skipped without PyTorch."""

import re
from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch._inductor.utils import run_and_get_code  # noqa: E402 - after PyTorch was found
from torch_kernels import Kernels  # noqa: E402
from torch_samples import K, N, check, heads_of, sample_x  # noqa: E402

OPERATORS = ("linear", "fused_linear", "matmul", "attention")


class _All(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """A product for each operator, with operands that are given and that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(K, K), torch.nn.Linear(K, K, bias=False)
        self.scale = torch.nn.Parameter(torch.rand(K))

    def forward(self, q: Any, k: Any, mask: Any) -> Any:  # noqa: ANN401 - tensors
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask)
        y = torch.matmul(self.first(heads), k.transpose(-1, -2)) * 0.5
        return y.sum(-1, keepdim=True) + self.second(heads) * self.scale + heads


@pytest.mark.parametrize("is_cpp", [True, False], ids=["C++", "Python"])
def test_calls_are_direct(*, is_cpp: bool) -> None:
    torch.manual_seed(0)
    model, q, k, mask = _All().eval(), heads_of(6), heads_of(N), sample_x(6, N)
    enabled = gt.enable(Kernels(rows=("1..99",)))
    compiled = torch.compile(model, options={"cpp_wrapper": is_cpp})

    with torch.no_grad():
        y, [code] = run_and_get_code(compiled, q, k, mask)
        check(y, model(q, k, mask))

    assert [one.is_taken for one in enabled.report] == [True] * len(enabled.report)
    for name in OPERATORS:
        call = f"aoti_torch_cpu_gemm_tuner_{name}(" if is_cpp else f"= gemm_tuner_{name}("
        assert call in code.replace(f'"C" AOTITorchError {call}', ""), name
    assert "call_dispatcher" not in code
    assert not re.search(r"assert_size_stride.*gemm_tuner", code)


class _Transposed(torch.nn.Module):  # type: ignore[misc]  # as above
    """A layer whose rows are computed as columns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(K, N)

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - tensors
        return self.layer(torch.tanh(x).transpose(-1, -2))


@pytest.mark.parametrize("shape", [(K, 6), (1, K, 6), (2, K, 6)])
def test_transposed_rows_are_not_copied(shape: tuple[int, ...]) -> None:
    model, x = _Transposed().eval(), torch.rand(*shape)
    enabled = gt.enable(Kernels(rows=("1..99",)))
    compiled = torch.compile(model)

    with torch.no_grad():
        check(compiled(x), model(x))
        with torch.profiler.profile() as seen:
            compiled(x)

    assert [one.is_taken for one in enabled.report] == [True]
    assert not {"aten::copy_", "aten::clone"} & {event.name for event in seen.events()}
