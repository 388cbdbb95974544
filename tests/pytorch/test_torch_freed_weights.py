"""Layers that hold their weights in packed form alone: what they compute, and get back."""

import copy
import io
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import (  # noqa: E402
    HIDDEN,
    LINEAR,
    K,
    N,
    check,
    operator_calls,
    sample_model,
    sample_x,
)

from gemm_tuner.errors import InvalidSetting  # noqa: E402
from gemm_tuner.torch.eager import packed_linear  # noqa: E402
from gemm_tuner.torch.eager.packed_linear import PackedLinear  # noqa: E402
from gemm_tuner.torch.eager.tuned_linear import TunedLinear  # noqa: E402


@pytest.fixture(autouse=True)
def _warned_anew() -> None:
    packed_linear._warn_of_unpacking.cache_clear()
    packed_linear._warn_of_reading.cache_clear()


def freed_model(
    rows: tuple[int | str, ...] = (1, "4..8"), *, dtype: str = "float32", bias: bool = True
) -> tuple[Any, Any]:
    """Return a model without its weights, and what it was."""
    model = sample_model(dtype, bias=bias)
    plain = copy.deepcopy(model)
    gt.replace(model, rows=list(rows), source=Kernels())
    gt.free_weights(model)
    assert {type(one) for one in model} == {PackedLinear, torch.nn.ReLU}
    return model, plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [True, False])
def test_any_number_of_rows_is_computed_from_packed_weights(
    dtype: str, *, bias: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = freed_model(dtype=dtype, bias=bias)

    with torch.no_grad():
        for rows in (1, 2, 3, 4, 8, 9, 12, 21):
            x = sample_x(rows, K, dtype=dtype)
            check(model(x), plain(x))
        x = sample_x(3, 5, K, dtype=dtype)
        for one in (x, x.mT.contiguous().mT, x[0, 0], x[:, ::2]):
            check(model(one), plain(one))

    assert not caplog.records


@pytest.mark.parametrize("rows", [("4..8",), (3, 5)])
def test_too_few_rows_are_computed_with_zeros_behind_them(rows: tuple[int | str, ...]) -> None:
    model, plain = freed_model(rows)

    with torch.no_grad():
        for count in range(1, 12):
            x = sample_x(count, K)
            check(model(x), plain(x))


def test_rows_that_a_kernel_is_for_are_one_call() -> None:
    model, _plain = freed_model()

    assert operator_calls(model, sample_x(6, K)) == {LINEAR: 2}
    assert operator_calls(model, sample_x(2, K)) == {LINEAR: 4}


def test_memory_is_freed_and_told() -> None:
    model = sample_model()
    weights = [model[0].weight, model[2].weight]
    size = sum(one.nbytes for one in weights)
    gt.replace(model, sample_x(), source=Kernels())

    freed = gt.free_weights(model)

    assert (freed.layers, freed.weight_bytes, freed.left) == (("0", "2"), size, {})
    assert freed.packed_bytes >= size
    assert str(freed).startswith(f"freed {size / 1024:.1f} KiB of weights of 2 layers, which hold")
    assert [name for name, _ in model.named_parameters()] == ["0.bias", "2.bias"]
    held = {id(one) for one in weights}
    for module in (model[0], model[2]):
        assert not held & {id(one) for one in vars(module).values()}
        assert module._tuned.packed is None
    assert gt.free_weights(model).layers == ()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_come_back_bit_for_bit(dtype: str) -> None:
    model, plain = freed_model(dtype=dtype)
    integers = torch.int32 if dtype == "float32" else torch.int16
    expected = plain[0].weight.view(integers)
    assert torch.equal(model[0].weight.view(integers), expected)
    assert torch.equal(model.state_dict()["0.weight"].view(integers), expected)
    assert list(model.state_dict()) == list(plain.state_dict())

    gt.restore(model)

    assert {type(one) for one in model} == {torch.nn.Linear, torch.nn.ReLU}
    assert torch.equal(model[0].weight.view(integers), expected)
    assert [name for name, _ in model.named_parameters()] == list(plain.state_dict())
    assert model[0].weight.requires_grad


def test_numbers_that_are_none_come_back_too() -> None:
    model = sample_model()
    with torch.no_grad():
        model[0].weight[:] = torch.arange(HIDDEN * K).view(HIDDEN, K) - 100
        bits = model[0].weight.view(torch.int32)
        bits[0, :4] = torch.tensor([0x7F800001, -1, 0x7FC00000, -0x80000000])
        bits[:, -1] = 1
    before = model[0].weight.detach().clone()
    gt.replace(model, sample_x(), source=Kernels())

    gt.free_weights(model)

    assert torch.equal(model[0].weight.view(torch.int32), before.view(torch.int32))


def _pickled(model: Any) -> Any:  # noqa: ANN401 - modules
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - our own


def _saved(model: Any) -> Any:  # noqa: ANN401 - modules
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved])
def test_a_copy_has_all_weights(copied: Callable[[Any], Any]) -> None:
    model, plain = freed_model()

    other = copied(model)

    assert type(other[0]) is TunedLinear
    assert list(other.state_dict()) == list(plain.state_dict())
    assert type(model[0]) is PackedLinear
    x = sample_x()
    with torch.no_grad():
        check(other(x), plain(x))
        check(model(x), plain(x))


@pytest.mark.parametrize("sharing", sorted(torch.multiprocessing.get_all_sharing_strategies()))
def test_a_copy_in_another_process_has_all_weights(sharing: str, tmp_path: Path) -> None:
    model, plain = freed_model()
    model.requires_grad_(False)
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(sharing)
    try:
        process = torch.multiprocessing.get_context("spawn").Process(
            target=torch.save, args=(model, tmp_path / "copy")
        )
        process.start()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)

    process.join(60)

    assert process.exitcode == 0
    other = torch.load(tmp_path / "copy", weights_only=False)
    assert type(model[0]) is PackedLinear
    assert list(other.state_dict()) == list(plain.state_dict())
    for name, one in plain.state_dict().items():
        assert torch.equal(other.state_dict()[name], one)


def test_a_shallow_copy_leaves_the_layer_alone() -> None:
    model, plain = freed_model()

    other = copy.copy(model[0])
    with torch.no_grad():
        other.weight.zero_()
        x = sample_x()
        check(other(x), plain[0].bias.expand(6, HIDDEN))
        check(model(x), plain(x))


def test_what_is_loaded_takes_the_place_of_what_was_packed() -> None:
    model, _plain = freed_model()
    other = sample_model()

    model.load_state_dict(other.state_dict())

    assert type(model[0]) is TunedLinear
    x = sample_x()
    with torch.no_grad():
        check(model(x), other(x))
        gt.free_weights(model)
        check(model(x), other(x))


def test_new_weights_take_the_place_of_what_was_packed() -> None:
    model, plain = freed_model()
    weight = torch.nn.Parameter(torch.ones(HIDDEN, K))

    model[0].weight = weight

    assert model[0].weight is weight
    plain[0].weight = weight
    x = sample_x()
    with torch.no_grad():
        check(model(x), plain(x))


@pytest.mark.parametrize(
    "moved", [lambda one: one.double(), lambda one: one.to("cpu"), lambda one: one.share_memory()]
)
def test_what_is_moved_or_cast_has_its_weights(moved: Callable[[Any], Any]) -> None:
    model, plain = freed_model()

    model, plain = moved(model), moved(plain)

    x = sample_x().to(plain[0].weight.dtype)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)


def test_what_kernels_cannot_compute_is_computed_and_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, plain = freed_model()
    x = sample_x()

    recorded = x.clone().requires_grad_()
    expected = x.clone().requires_grad_()
    model(recorded).sum().backward()
    plain(expected).sum().backward()
    check(recorded.grad, expected.grad)
    check(model[0].bias.grad, plain[0].bias.grad)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=2e-2, atol=2e-2)
    with torch.no_grad():
        check(torch.vmap(model)(x), plain(x))
        check(model(torch.empty(0, K)), plain(torch.empty(0, K)))
    _y, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    _y, right = torch.func.jvp(plain, (x,), (torch.ones_like(x),))
    check(tangent, right)
    check(torch.func.grad(lambda one: model(one).sum())(x), expected.grad)

    assert [one.levelno for one in caplog.records] == [logging.WARNING]
    for wrong in (torch.empty(6, K + 1), torch.empty(6, K, dtype=torch.float64)):
        with pytest.raises(RuntimeError), torch.no_grad():
            model(wrong)


def test_what_others_hold_is_kept_and_told() -> None:
    tied = sample_model()
    tied.append(torch.nn.ReLU())
    other = torch.nn.Linear(K, HIDDEN)
    other.weight = tied[0].weight
    tied.append(torch.nn.Sequential(torch.nn.Linear(N, K), other))
    whole = torch.randn(2 * N, HIDDEN)
    tied[2].weight = torch.nn.Parameter(whole[:N])
    gt.replace(tied, sample_x(), source=Kernels())

    freed = gt.free_weights(tied)

    assert freed.layers == ("4.0",)
    assert freed.left == {
        "0": "its weights are shared with another layer",
        "2": "its weights are a part of a larger array",
        "4.1": "its weights are shared with another layer",
    }
    assert "\n0: kept: its weights are shared with another layer\n" in str(freed)


def test_what_a_tracer_follows_is_refused_and_a_compiler_leaves_it_apart() -> None:
    model, plain = freed_model()
    x = sample_x()

    with torch.no_grad():
        check(torch.compile(model, backend="eager")(x), plain(x))
        follows: tuple[Callable[[], Any], ...] = (
            lambda: torch.jit.trace(model, x),
            lambda: torch.export.export(model, (x,), strict=True),
            lambda: torch.export.export(model, (x,), strict=False),
            lambda: torch.jit.script(model),
        )
        for follow in follows:
            with pytest.raises(Exception, match=r"gemm_tuner\.torch\.restore"):
                follow()


def test_a_fixed_order_is_fixed_in_pieces_too() -> None:
    model = sample_model()
    gt.replace(model, rows=[1, "4..8"], source=Kernels(), reduction="fixed")
    x = sample_x(21, K)
    with torch.no_grad():
        one_by_one = torch.cat([model(row) for row in x.split(1)])
        gt.free_weights(model)
        assert torch.equal(model(x), one_by_one)


def test_tuning_collecting_and_replacing_have_all_weights() -> None:
    model, _plain = freed_model()
    assert "0" in str(gt.collect(model, sample_x()))
    assert type(model[0]) is TunedLinear

    gt.free_weights(model)
    report = gt.replace(model, sample_x(), source=Kernels())
    assert len(report.taken) == 2
    gt.free_weights(model)
    gt.tune_model(model, sample_x(), source=Kernels(), budget_s=0)
    assert PackedLinear not in {type(one) for one in model}


def test_only_a_module_can_let_go_of_weights() -> None:
    with pytest.raises(InvalidSetting, match="of type int"):
        gt.free_weights(3)
