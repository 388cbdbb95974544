"""Products that oneDNN won and that it computes where MKL is slow; skipped without PyTorch."""

from dataclasses import replace
from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import K, N, check, passed, sample_model, sample_x  # noqa: E402

from gemm_tuner.layers.wanted import FoundLayer, WantedLayer  # noqa: E402
from gemm_tuner.machine.detect import detect_cpu  # noqa: E402
from gemm_tuner.torch.inductor import onednn_linear  # noqa: E402
from gemm_tuner.torch.inductor.onednn_linear import BY_ONEDNN  # noqa: E402
from gemm_tuner.torch.operators import library  # noqa: E402


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize(
    ("fastest", "vendor", "is_by_onednn", "cpp_wrapper"),
    [
        ("onednn", "AuthenticAMD", True, False),
        ("openblas", "AuthenticAMD", True, True),
        ("mkl", "AuthenticAMD", False, False),
        ("onednn", "GenuineIntel", False, False),
        (None, "AuthenticAMD", False, False),
    ],
)
def test_what_is_left_is_computed_by_onednn_where_mkl_is_slow(
    fastest: str | None,
    vendor: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_by_onednn: bool,
    cpp_wrapper: bool,
) -> None:
    if not torch.backends.mkl.is_available():
        pytest.skip("this PyTorch has no MKL")
    _let_mkl_be_slow(monkeypatch, vendor)
    model, x = sample_model(bias=False).eval(), sample_x(2, 3, K)
    tuned = gt.enable(_Losing(fastest))
    with torch.no_grad(), torch._inductor.config.patch(cpp_wrapper=cpp_wrapper):
        y, [code] = torch._inductor.utils.run_and_get_code(torch.compile(model), x)
        check(y, model(x))
    assert ("mkl_linear" in code) is not is_by_onednn
    assert (
        "gemm_tuner.onednn_linear" in code or "gemm_tuner::onednn_linear" in code
    ) is is_by_onednn
    assert [BY_ONEDNN in one.reason for one in tuned.report] == [is_by_onednn] * 2


class _Losing(Kernels):
    """Has no kernel, since a library won."""

    def __init__(self, fastest: str | None) -> None:
        super().__init__()
        self._fastest = (fastest,) if fastest else ()

    def find(self, wanted: WantedLayer) -> FoundLayer:  # noqa: ARG002 - as in Source
        return FoundLayer(kernels=(), reasons=(), fastest=self._fastest)


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize(
    ("shape", "compute"),
    [
        ((6, K), lambda layer, x: layer(x) + x),
        ((6, K), lambda layer, x: torch.relu(layer(x) + 1)),
        ((1, K), lambda layer, x: layer(x) + layer(x)),
        ((6, K), lambda layer, x: layer(x) + torch.ones(K)),
        ((K,), lambda layer, x: layer(x)),
        ((K, 6), lambda layer, x: layer(x.t()) + x.t()),
        ((2, 3, K), lambda layer, x: x + torch.nn.functional.gelu(layer(x))),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_products_by_onednn_are_none_that_inductor_fuses(
    shape: tuple[int, ...],
    compute: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
    *,
    bias: bool,
) -> None:
    """It fails where a residual follows products of oneDNN's whose weights are packed already."""
    _let_mkl_be_slow(monkeypatch)
    layer, x = torch.nn.Linear(K, K, bias=bias).eval(), sample_x(*shape)
    tuned = gt.enable(_Losing("onednn"))
    with torch.no_grad():
        check(torch.compile(lambda x: compute(layer, x))(x), compute(layer, x))
    told = [BY_ONEDNN in one.reason for one in tuned.report]
    assert told
    assert all(told) is torch.backends.mkl.is_available()


@pytest.mark.parametrize(
    "bias", [lambda: torch.randn(N, K)[:, 0], lambda: torch.randn(1).expand(N), lambda: None]
)
def test_a_product_by_onednn_reads_a_bias_that_is_not_dense(bias: Any) -> None:  # noqa: ANN401
    library()
    x, w, given = sample_x(), torch.randn(N, K), bias()
    packed = torch.ops.gemm_tuner.onednn_pack(w, len(x))

    y = torch.ops.gemm_tuner.onednn_linear(x, packed, given, N)

    check(y, torch.nn.functional.linear(x, w, given))


def test_a_product_by_onednn_is_refused_where_it_is_recorded() -> None:
    library()
    x, w = sample_x(), torch.randn(N, K)
    packed = torch.ops.gemm_tuner.onednn_pack(w, len(x))
    check(torch.ops.gemm_tuner.onednn_linear(x, packed, None, N), x @ w.T)
    with pytest.raises(NotImplementedError, match="derivative"):
        torch.ops.gemm_tuner.onednn_linear(x.requires_grad_(), packed, None, N)


def _let_mkl_be_slow(patch: pytest.MonkeyPatch, vendor: str = "AuthenticAMD") -> None:
    """Let this be a CPU of a vendor, and the small products of tests be large ones."""
    cpu = replace(detect_cpu(), vendor=vendor)
    patch.setattr(onednn_linear, "detect_cpu", lambda: cpu)
    patch.setattr(onednn_linear, "_LEAST_FLOP", 0)


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0), ("float32", 1e9)])
def test_what_onednn_won_stays_in_bf16_and_where_it_is_small(
    dtype: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    _let_mkl_be_slow(monkeypatch)
    monkeypatch.setattr(onednn_linear, "_LEAST_FLOP", least)
    model, x = sample_model(dtype).eval(), sample_x(dtype=dtype)
    tuned = gt.enable(_Losing("onednn"))
    with torch.no_grad():
        check(passed(tuned, model, x)(x), model(x))
    assert not any(BY_ONEDNN in one.reason for one in tuned.report)
