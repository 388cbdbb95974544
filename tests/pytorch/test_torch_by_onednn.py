"""Products that oneDNN won and that it computes where MKL is slow; skipped without PyTorch."""

import copy
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import K, N, check, passed, sample_model, sample_x  # noqa: E402

from gemm_tuner.layers.wanted import FoundLayer, WantedLayer  # noqa: E402
from gemm_tuner.machine.detect import detect_cpu  # noqa: E402
from gemm_tuner.torch import asking  # noqa: E402
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
    patch.setattr(asking, "detect_cpu", lambda: cpu)
    patch.setattr(asking, "LEAST_ONEDNN_FLOP", 0)


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0), ("float32", 1e9)])
def test_what_onednn_won_stays_in_bf16_and_where_it_is_small(
    dtype: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    _let_mkl_be_slow(monkeypatch)
    monkeypatch.setattr(asking, "LEAST_ONEDNN_FLOP", least)
    model, x = sample_model(dtype).eval(), sample_x(dtype=dtype)
    tuned = gt.enable(_Losing("onednn"))
    with torch.no_grad():
        check(passed(tuned, model, x)(x), model(x))
    assert not any(BY_ONEDNN in one.reason for one in tuned.report)


def _multiplied(model: Any, x: Any) -> int:  # noqa: ANN401 - a module and a tensor
    """Return how many products of a call oneDNN computes."""
    with torch.profiler.profile() as profiled:
        model(x)
    return sum(one.name == "mkldnn::_linear_pointwise" for one in profiled.events())


def _replaced(patch: pytest.MonkeyPatch, *, bias: bool = True) -> Any:  # noqa: ANN401 - a module
    """Return two layers that oneDNN computes in eager mode, as where PyTorch has MKL."""
    _let_mkl_be_slow(patch)
    patch.setattr(asking, "libraries_of_pytorch", lambda _dtype: ("mkl",))
    model = sample_model(bias=bias).eval()
    report = gt.replace(model, rows=[1, 6, 9, "20..30"], source=_Losing("onednn"))
    assert [one.is_taken for one in report] == [False, False]
    assert all("PyTorch would call MKL" in one.reason for one in report)
    return model


@pytest.mark.parametrize("bias", [True, False])
def test_layers_in_eager_mode_are_computed_by_onednn(
    monkeypatch: pytest.MonkeyPatch, *, bias: bool
) -> None:
    model = _replaced(monkeypatch, bias=bias)
    plain = copy.deepcopy(model)
    gt.restore(plain)
    assert type(plain[0]) is torch.nn.Linear
    wide = torch.randn(6, 2 * K)
    with torch.no_grad():
        for x in (
            *(sample_x(), sample_x(2, 3, K), sample_x(1, K), sample_x(9, K)),
            *(wide[:, ::2], wide[:, 1::2], torch.randn(K, 6).t(), torch.randn(K).expand(6, K)),
        ):
            check(model(x), plain(x))
            assert _multiplied(model, x) == 2
            assert _multiplied(plain, x) == 0
        others = (sample_x(0, K), torch.randn(K), sample_x(7, K), sample_x(25, K))
        for x in others:
            check(model(x), plain(x))
            assert _multiplied(model, x) == 0
        x = torch._neg_view(sample_x())
        check(model(x), plain(x))
        assert _multiplied(model[:1], x) == 0
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(sample_x(6, K + 1))
        x = sample_x()
        check(torch.vmap(model)(x), plain(x))
        check(torch.compile(model, backend="eager")(x), plain(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == torch.bfloat16
    x = sample_x().requires_grad_()
    model.requires_grad_(requires_grad=False)
    model(x).sum().backward()
    check(x.grad, torch.func.grad(lambda one: plain(one).sum())(x.detach()))


def test_weights_of_onednn_follow_their_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _replaced(monkeypatch), sample_x()
    plain = copy.deepcopy(model)
    gt.restore(plain)
    for fused in (False, True):
        for one in (model, plain):
            with torch.no_grad():
                one(x)
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1, fused=fused)
            one(x).sum().backward()
            optimizer.step()
        with torch.no_grad():
            check(model(x), plain(x))
            assert _multiplied(model, x) == 2
    with torch.no_grad():
        for one in (model, plain):
            one[0].weight.mul_(2)
            one[2].weight = torch.nn.Parameter(one[2].weight.detach().t().contiguous().t())
        check(model(x), plain(x))
        model.load_state_dict(plain.state_dict())
        check(model(x), plain(x))
        check(model.double()(x.double()), plain.double()(x.double()))


def test_copies_of_layers_by_onednn_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _replaced(monkeypatch), sample_x()
    with torch.no_grad():
        expected = model(x)
        for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
            check(one(x), expected)
            assert _multiplied(one, x) == 2
    freed = gt.free_weights(model)
    assert not freed.layers
    assert all("oneDNN computes it" in why for why in freed.left.values())
    gt.replace(model, rows=[6], source=Kernels())
    with torch.no_grad():
        check(model(x), expected)
        assert _multiplied(model, x) == 0


@pytest.mark.parametrize(
    ("fastest", "vendor", "reduction", "dtype"),
    [
        ("mkl", "AuthenticAMD", "any", "float32"),
        (None, "AuthenticAMD", "any", "float32"),
        ("onednn", "GenuineIntel", "any", "float32"),
        ("onednn", "AuthenticAMD", "fixed", "float32"),
        ("onednn", "AuthenticAMD", "any", "bfloat16"),
    ],
)
def test_layers_that_mkl_may_be_best_for_stay_as_they_are(
    fastest: str | None, vendor: str, reduction: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _let_mkl_be_slow(monkeypatch, vendor)
    model = sample_model(dtype).eval()

    report = gt.replace(model, rows=[6], source=_Losing(fastest), reduction=reduction)

    assert type(model[0]) is torch.nn.Linear
    assert not any("oneDNN computes it" in one.reason for one in report)


def test_weights_that_become_a_part_of_the_same_memory_are_not_read_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = _replaced(monkeypatch, bias=False)[:1], sample_x()
    with torch.no_grad():
        model(x)
        whole = model[0].weight
        for part in (whole[:-3], whole):
            model[0].weight = torch.nn.Parameter(part, requires_grad=False)
            check(model(x), x @ part.T)
        model[0].weight.data = whole[:-3]
        check(model(x), x @ whole[:-3].T)


LOADED = """
import sys
import torch
model, x, expected = torch.load(sys.argv[1], weights_only=False)
with torch.profiler.profile() as profiled, torch.no_grad():
    assert torch.allclose(model(x), expected, atol=1e-4)
print(sum(one.name == "mkldnn::_linear_pointwise" for one in profiled.events()))
"""


@pytest.mark.parametrize("has_compiler", [True, False])
def test_layers_by_onednn_are_loaded_in_another_process(
    tmp_path: Path, *, has_compiler: bool
) -> None:
    if detect_cpu().vendor == "GenuineIntel":
        pytest.skip("on this CPU, MKL may be faster than oneDNN")
    model, x = torch.nn.Linear(512, 1024), torch.randn(64, 512)
    (line,) = gt.replace(model, rows=[64], source=_Losing("onednn"))
    assert "oneDNN computes it here" in line.reason
    with torch.no_grad():
        torch.save((model, x, model(x)), tmp_path / "model.pt")
    other = {"PATH": str(tmp_path), "GEMM_TUNER_CACHE": str(tmp_path / "cache")}

    told = subprocess.run(
        [sys.executable, "-c", LOADED, tmp_path / "model.pt"],
        env=os.environ | ({} if has_compiler else other),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    assert told.stdout.split() == ["1" if has_compiler else "0"]
    assert ("computes as it would without gemm-tuner" in told.stderr) is not has_compiler


def test_a_copy_where_mkl_may_be_best_computes_as_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pickled = pickle.dumps(_replaced(monkeypatch))
    _let_mkl_be_slow(monkeypatch, "GenuineIntel")

    copied = pickle.loads(pickled)  # noqa: S301 - of this test

    with torch.no_grad():
        for x in (sample_x(), sample_x(0, K)):
            assert copied(x).shape == (len(x), N)
            assert _multiplied(copied, x) == 0


def test_a_range_of_rows_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    _let_mkl_be_slow(monkeypatch)
    model = sample_model().eval()

    gt.replace(model, rows=["2..6"], source=_Losing("onednn"))

    assert type(model[0]) is torch.nn.Linear
