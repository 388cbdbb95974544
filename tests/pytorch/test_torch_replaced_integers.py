"""Layers with torchao's weights of integers call tuned kernels in eager mode."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [
    pytest.mark.proof,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of torchao
]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("torchao", reason="torchao is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import LINEAR, check, operator_calls, sample_x  # noqa: E402

from gemm_tuner.torch.eager import integer_weights, tuned_linear  # noqa: E402
from gemm_tuner.torch.eager.weight_only_linear import WeightOnlyLinear  # noqa: E402

N, HIDDEN, K = 48, 96, 64
W_TYPES = ("s8", "u4")


def sample_model(dtype: str = "float32") -> Any:  # noqa: ANN401 - a module
    return (
        torch.nn.Sequential(
            torch.nn.Linear(K, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, N, bias=False)
        )
        .eval()
        .to(getattr(torch, dtype))
    )


def quantised(config: Any, dtype: str = "float32", model: Any = None) -> Any:  # noqa: ANN401
    from torchao.quantization import quantize_  # noqa: PLC0415 - it warns

    model = sample_model(dtype) if model is None else model
    quantize_(model, _configs()[config] if isinstance(config, str) else config)
    return model


def _configs() -> dict[str, Any]:
    from torchao.prototype.quantization.int4 import (  # noqa: PLC0415
        PrototypeInt4WeightOnlyConfig,
    )
    from torchao.quantization import (  # noqa: PLC0415
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
    )
    from torchao.quantization.granularity import PerGroup, PerTensor  # noqa: PLC0415

    def by_bytes(**how: Any) -> Any:  # noqa: ANN401 - of torchao
        return Int8WeightOnlyConfig(set_inductor_config=False, **how)

    return {
        "s8": by_bytes(),
        "one scale": by_bytes(granularity=PerTensor()),
        "groups of bytes": by_bytes(granularity=PerGroup(32)),
        "u4": PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False),
        "dynamic": Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
    }


def replaced(w_type: str, dtype: str = "float32") -> tuple[Any, Any]:
    """Return a model that calls kernels, and what it computes without them."""
    model = quantised(w_type, dtype)
    plain = copy.deepcopy(model)
    report = gt.replace(model, sample_x(6, K, dtype=dtype), source=Kernels())
    assert [one.is_taken for one in report] == [True, True]
    return model, plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("w_type", [*W_TYPES, "one scale"])
def test_integers_are_packed_and_multiplied(w_type: str, dtype: str) -> None:
    model, source, x = quantised(w_type, dtype), Kernels(), sample_x(2, 3, K, dtype=dtype)
    with torch.no_grad():
        expected = model(x)
        report = gt.replace(model, x, source=source)
        check(model(x), expected)
        assert operator_calls(model, x)[LINEAR] == 2
        check(model(x[:, :2]), model(x)[:, :2])  # no kernel is for 4 rows
        found = gt.debug(model, x, folder=None)
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    given, group = ("u4", "g32") if w_type == "u4" else ("s8", "gk")
    types = f"{short}_{given}_f32_{short}"
    assert [f"{one.dtype} {one.w_layout} {one.epilogue}" for one in source.asked] == [
        f"{types} nk:{group} {one}" for one in ("bias", "none")
    ]
    assert [one.problem for one in report] == [
        f"{types} {sizes}" for sizes in (f"6x96x64 nk:{group} bias", f"6x48x96 nk:{group}")
    ]
    assert found.wrong is None
    assert {one.name for one in found.layers} == {"0", "2"}
    gt.restore(model)
    assert type(model[0]) is torch.nn.Linear
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def _scale_in_place(model: Any) -> None:  # noqa: ANN401 - a module
    weight = model[0].weight
    (weight.scale if hasattr(weight, "scale") else weight.scale_and_zero).mul_(2)


def _other_elements(model: Any) -> None:  # noqa: ANN401 - a module
    weight = model[2].weight
    weight.qdata.copy_(weight.qdata.roll(1, 0))


def _other_weights(model: Any) -> None:  # noqa: ANN401 - a module
    torch.manual_seed(1)
    w_type = "s8" if hasattr(model[0].weight, "scale") else "u4"
    model[0].weight = quantised(w_type)[0].weight


def _loaded(model: Any) -> None:  # noqa: ANN401 - a module
    torch.manual_seed(1)
    w_type = "s8" if hasattr(model[0].weight, "scale") else "u4"
    model.load_state_dict(quantised(w_type).state_dict(), assign=True)


def _copied(model: Any) -> None:  # noqa: ANN401 - a module
    torch.manual_seed(1)
    w_type = "s8" if hasattr(model[0].weight, "scale") else "u4"
    model.load_state_dict(quantised(w_type).state_dict())


def _fewer_rows(model: Any) -> None:  # noqa: ANN401 - a module
    if hasattr(model[2].weight, "scale"):  # torchao cuts no weights of 4 bits
        model[2].weight = torch.nn.Parameter(model[2].weight[: N // 2], requires_grad=False)
    else:
        _other_elements(model)


def _trained(model: Any) -> None:  # noqa: ANN401 - a module
    weight = model[2].weight
    scale = weight.scale if hasattr(weight, "scale") else weight.scale_and_zero
    scale.grad = torch.ones_like(scale)
    torch.optim.AdamW([scale], lr=0.5, fused=True).step()  # raises no version


CHANGES = [
    *(_scale_in_place, _other_elements, _other_weights, _loaded, _copied, _fewer_rows, _trained)
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("w_type", W_TYPES)
def test_integers_that_change_are_packed_again(w_type: str, change: Callable[[Any], None]) -> None:
    model, plain = replaced(w_type)
    x = sample_x(6, K)
    with torch.no_grad():
        before = model(x)
        for one in (model, plain):
            change(one)
        check(model(x), plain(x))
        after = model(x)
    assert after.shape != before.shape or not torch.allclose(after, before)
    is_left = change is _fewer_rows and w_type == "s8"
    assert operator_calls(model, x)[LINEAR] == (1 if is_left else 2)


@pytest.mark.parametrize("w_type", W_TYPES)
def test_copies_and_saved_models_call_kernels(w_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = replaced(w_type)
    x, file, source = sample_x(6, K), io.BytesIO(), Kernels(text="somewhere")
    gt.replace(model, x, source=source)
    for one in (model[0], model[2]):
        vars(one).pop("extra_repr")  # torchao's, which cannot be loaded again
    monkeypatch.setattr(tuned_linear, "open_source", lambda _text: source)
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        for one in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            check(one(x), plain(x))
            assert operator_calls(one, x)[LINEAR] == 2
            assert one.state_dict().keys() == plain.state_dict().keys()
            assert type(one.state_dict()["0.weight"]) is type(plain[0].weight)


@pytest.mark.parametrize("w_type", W_TYPES)
def test_what_kernels_do_not_compute_is_left_to_torchao(w_type: str) -> None:
    model, plain = replaced(w_type)
    x = sample_x(6, K)
    recorded = x.clone().requires_grad_()
    with torch.no_grad():
        for one in (x[:5], x[:0], x.expand(3, 6, K)):
            assert torch.equal(model(one), plain(one))
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == plain(x).dtype
    check(model(recorded), plain(recorded))
    with pytest.raises((RuntimeError, AssertionError)):  # torchao's own
        model(sample_x(6, K + 1))
    model[0].weight = torch.nn.Parameter(torch.rand(HIDDEN, K), requires_grad=False)
    with torch.no_grad():
        check(model[0](x), torch.nn.functional.linear(x, model[0].weight, model[0].bias))
    assert isinstance(model[0], WeightOnlyLinear)
    gt.restore(model)
    assert type(model[0]) is torch.nn.Linear


REASONS = {
    "dynamic": "torchao rounds x to bytes",
    "groups of bytes": "scales for groups",
}


@pytest.mark.parametrize("config", REASONS)
def test_other_weights_of_torchao_stay_with_their_reason(config: str) -> None:
    model, x = quantised(config), sample_x(6, K)
    report = gt.replace(model, x, source=Kernels())
    assert not any(one.is_taken for one in report)
    assert all(REASONS[config] in one.reason for one in report)
    assert type(model[0]) is torch.nn.Linear


def test_weights_of_float16_and_unknown_orders_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantised("s8", "float16")
    [first, _second] = gt.replace(model, rows=[6], source=Kernels())
    assert "torch.float16" in first.reason
    monkeypatch.setattr(integer_weights, "can_be_read", lambda: False)
    [first, _second] = gt.replace(quantised("u4"), rows=[6], source=Kernels())
    assert "order of packed weights" in first.reason


def test_kernels_that_read_no_floats_for_zero_points_are_left() -> None:
    source, model = Kernels(), quantised("u4")

    class Earlier(Kernels):
        def find(self, wanted: Any) -> Any:  # noqa: ANN401 - as in Source
            found = source.find(wanted)
            for one in found.kernels:
                one.takes_float_zero_points = False
            return found

    try:
        report = gt.replace(model, rows=[6], source=Earlier())
    finally:
        for wanted in tuple(source.asked):
            for one in Kernels.find(source, wanted).kernels:
                one.takes_float_zero_points = True
    assert all("zero points of floats" in one.reason for one in report)
    assert not any(one.is_taken for one in report)


@pytest.mark.parametrize("w_type", W_TYPES)
def test_a_part_that_is_trained_is_recorded(w_type: str) -> None:
    model, plain = replaced(w_type)
    x = sample_x(6, K)
    for one in (model, plain):
        weight = one[2].weight
        name = "scale" if w_type == "s8" else "scale_and_zero"
        setattr(weight, name, torch.nn.Parameter(getattr(weight, name).clone()))
    assert model(x).requires_grad == plain(x).requires_grad
    with torch.no_grad():
        check(model(x), plain(x))
        assert operator_calls(model, x)[LINEAR] == 2


def test_a_model_that_was_cast_after_it_was_quantised_is_left() -> None:
    report = gt.replace(quantised("s8").bfloat16(), rows=[6], source=Kernels())
    assert [one.is_taken for one in report] == [False, True]  # the second has no bias
    assert "cast after it was quantised" in report[0].reason


@pytest.mark.parametrize("w_type", W_TYPES)
def test_a_compiled_model_is_torchaos_own(w_type: str) -> None:
    model, plain = replaced(w_type)
    x = sample_x(6, K)
    with torch.no_grad():
        check(torch.compile(model, backend="aot_eager")(x), plain(x))


@pytest.mark.parametrize("w_type", W_TYPES)
def test_freed_weights_are_those_of_floats_alone(w_type: str) -> None:
    model, _plain = replaced(w_type)
    freed = gt.free_weights(model)
    assert freed.layers == ()
    assert set(freed.left) == {"0", "2"}
    assert all("torchao" in why for why in freed.left.values())


def test_integers_of_a_fixed_order_refuse_other_calls() -> None:
    model, x = quantised("s8"), sample_x(6, K)
    gt.replace(model, x, source=Kernels(), reduction="fixed")
    with torch.no_grad():
        model(x)
        with pytest.raises(gt_errors().InvalidSetting, match="'fixed'"):
            model(x[:5])


def gt_errors() -> Any:  # noqa: ANN401 - a module
    from gemm_tuner import errors  # noqa: PLC0415

    return errors
