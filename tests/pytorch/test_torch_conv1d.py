"""GPT-2's linear layers that call kernels; skipped where PyTorch or transformers is missing."""

import copy
import io
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from gemm_tuner.errors import InvalidSetting

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
prune: Any = pytest.importorskip("torch.nn.utils.prune")
pytorch_utils: Any = pytest.importorskip(
    "transformers.pytorch_utils", reason="transformers is not installed"
)

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import LINEAR, MODULE, K, N, check, operator_calls, sample_x  # noqa: E402

from gemm_tuner.layers.wanted import FoundLayer, WantedLayer  # noqa: E402
from gemm_tuner.torch.eager import packed_by_onednn, tuned_conv1d  # noqa: E402

CALLED = {LINEAR: 1, MODULE: 1}


def _layer(dtype: str = "float32") -> Any:  # noqa: ANN401 - a module
    torch.manual_seed(3)
    layer = pytorch_utils.Conv1D(N, K)
    torch.nn.init.normal_(layer.bias)
    return layer.to(getattr(torch, dtype)).eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replaced_layer_computes_what_it_did(dtype: str) -> None:
    layer, x, source = _layer(dtype), sample_x(dtype=dtype), Kernels()
    with torch.no_grad():
        expected = layer(x)

    report = gt.replace(layer, x, source=source)

    assert [one.is_taken for one in report] == [True]
    assert [(one.n, one.k, one.epilogue) for one in source.asked] == [(N, K, "bias")]
    with torch.no_grad():
        check(layer(x), expected)
        check(layer(x.expand(2, *x.shape)), expected.expand(2, *expected.shape))
        assert operator_calls(layer, x) == CALLED
    assert isinstance(layer, pytorch_utils.Conv1D)
    assert not isinstance(layer, torch.nn.Linear)  # whose weights lie otherwise
    assert layer.weight.shape == (K, N)
    assert list(layer.state_dict()) == ["weight", "bias"]
    gt.restore(layer)
    assert not operator_calls(layer, x)
    assert type(layer) is pytorch_utils.Conv1D


def test_rows_are_seen_in_a_call_by_its_own_name() -> None:
    layer, x = _layer(), sample_x()

    report = gt.replace(layer, {"x": x}, source=Kernels())

    assert [one.rows for one in report] == [(len(x),)]
    with torch.no_grad():
        check(layer(x=x), layer(x))
        check(layer.forward(x=x), layer(x))


def test_threads_get_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_conv1d._classes.cache_clear()
    barrier = threading.Barrier(4)

    def import_slowly(name: str) -> ModuleType:
        time.sleep(0.01)
        return import_module(name)

    def ask(_thread: int) -> Any:  # noqa: ANN401 - classes
        barrier.wait()
        return tuned_conv1d.conv1d_classes()

    monkeypatch.setattr(tuned_conv1d, "import_module", import_slowly)
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = set(pool.map(ask, range(4)))

    assert len(found) == 1
    assert found == {(pytorch_utils.Conv1D, tuned_conv1d.TunedConv1D)}


def test_a_layer_that_lost_its_bias_is_left() -> None:
    layer = _layer()
    del layer._parameters["bias"]

    (line,) = gt.replace(layer, rows=[5], source=Kernels())

    assert "computed from others" in line.reason


def test_changed_and_trained_weights_are_packed_again() -> None:
    layer, x = _layer(), sample_x()
    gt.replace(layer, x, source=Kernels())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    y = layer(x)
    assert y.requires_grad
    y.sum().backward()
    optimizer.step()
    with torch.no_grad():
        check(layer(x), x @ layer.weight + layer.bias)
        layer.weight.mul_(2)
        check(layer(x), x @ layer.weight + layer.bias)
        layer.load_state_dict(_layer().state_dict())
        check(layer(x), _layer()(x))
        assert operator_calls(layer, x) == CALLED
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        check(torch.vmap(layer)(x), layer(x))
    check(torch.func.jacrev(lambda one: layer(one).sum(0))(x)[0, 0], layer.weight[:, 0].detach())


def test_copies_and_files_compute_the_same() -> None:
    layer, x = _layer(), sample_x()
    gt.replace(layer, x, source=Kernels())
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copied = copy.deepcopy(layer)
    pickled = pickle.loads(pickle.dumps(layer))  # noqa: S301 - of this test
    with torch.no_grad():
        expected = layer(x)
        for one in (copied, pickled, torch.load(file, weights_only=False)):
            check(one(x), expected)
            assert type(one) is type(layer)
        assert operator_calls(copied, x) == CALLED


def test_a_fixed_order_of_additions() -> None:
    layer, x = _layer(), sample_x()
    gt.replace(layer, rows=["1..6"], source=Kernels(), reduction="fixed")
    with torch.no_grad():
        whole = layer(x)
        assert torch.equal(whole, torch.stack([layer(row) for row in x]))
        check(whole, x @ layer.weight + layer.bias)
        with pytest.raises(InvalidSetting, match="no kernel computes 7 rows"):
            layer(sample_x(7, K))


def test_what_is_compiled_or_pruned_takes_the_ordinary_way() -> None:
    layer, x = _layer(), sample_x()
    gt.replace(layer, x, source=Kernels())
    with torch.no_grad():
        expected = layer(x)
        check(torch.compile(layer, backend="eager")(x), expected)
        check(torch.jit.trace(layer, x, check_trace=False)(x), expected)
        prune.l1_unstructured(layer, "weight", 0.5)
        check(layer(x), x @ layer.weight + layer.bias)
        assert not operator_calls(layer, x)
        gt.restore(layer)
        check(layer(x), x @ layer.weight + layer.bias)


def test_a_parametrized_layer_is_restored() -> None:
    layer, x = _layer(), sample_x()
    gt.replace(layer, x, source=Kernels())
    torch.nn.utils.parametrizations.weight_norm(layer)
    with torch.no_grad():
        check(layer(x), x @ layer.weight + layer.bias)
        gt.restore(layer)
        check(layer(x), x @ layer.weight + layer.bias)
    assert type(layer).__mro__[1] is pytorch_utils.Conv1D


def test_onednn_computes_what_it_won(monkeypatch: pytest.MonkeyPatch) -> None:
    class Losing(Kernels):
        def find(self, wanted: WantedLayer) -> FoundLayer:  # noqa: ARG002 - as in Source
            return FoundLayer(kernels=(), reasons=(), fastest=("onednn",))

    monkeypatch.setattr(packed_by_onednn, "is_left_to_mkl", lambda *_asked: True)
    layer, x = _layer(), sample_x()

    (line,) = gt.replace(layer, x, source=Losing())

    assert "oneDNN computes it here" in line.reason
    copied = pickle.loads(pickle.dumps(layer))  # noqa: S301 - of this test
    with torch.no_grad():
        expected = x @ layer.weight + layer.bias
        for one in (layer, copied, copy.deepcopy(layer)):
            with torch.profiler.profile() as profiled:
                check(one(x), expected)
            assert "mkldnn::_linear_pointwise" in [event.name for event in profiled.events()]
    gt.restore(layer)
    assert type(layer) is pytorch_utils.Conv1D


def test_its_weights_are_kept() -> None:
    model = torch.nn.Sequential(_layer(), torch.nn.Linear(N, K))
    gt.replace(model, sample_x(), source=Kernels())

    freed = gt.free_weights(model)

    assert freed.layers == ("1",)
    assert freed.left == {"0": "it is a Conv1D, and only torch.nn.Linear is freed"}


def test_a_class_of_its_own_is_left() -> None:
    class Scaled(pytorch_utils.Conv1D):  # type: ignore[misc]  # nothing is known of its base
        def forward(self, x: Any) -> Any:  # noqa: ANN401 - tensors
            return 2 * super().forward(x)

    (line,) = gt.replace(Scaled(N, K), sample_x(), source=Kernels())

    assert not line.is_taken
    assert line.reason == "it is a Scaled, which may compute something else"
