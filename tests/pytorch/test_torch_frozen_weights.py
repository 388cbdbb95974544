"""Weights that change after a model was compiled; skipped where PyTorch is not installed."""

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import HIDDEN, K, check, sample_model, sample_x  # noqa: E402

from gemm_tuner.torch.inductor import frozen_weights  # noqa: E402

pytestmark.append(pytest.mark.usefixtures("loops_by_operators"))
LOG = "gemm_tuner.torch.inductor.frozen_weights"


def _compiled(model: Any, **how: Any) -> Any:  # noqa: ANN401 - modules
    gt.enable(Kernels())
    compiled = torch.compile(model, **how)
    with torch.no_grad():
        compiled(sample_x())
    return compiled


def _told(caplog: pytest.LogCaptureFixture, compiled: Any, x: Any) -> list[str]:  # noqa: ANN401
    """Return what three calls warn of."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, LOG), torch.no_grad():
        for _ in range(3):
            compiled(x)
    return [one.getMessage() for one in caplog.records if one.name == LOG]


class _Remembers(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """A layer beside a buffer, which some calls write and some read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(K, HIDDEN)
        self.register_buffer("kept", torch.zeros(*sample_x().shape[:-1], HIDDEN))

    def forward(self, x: Any, *, is_written: bool) -> Any:  # noqa: ANN401 - tensors
        y = self.layer(x)
        if is_written:
            self.kept.copy_(y)
        return y * self.kept


class _RemembersRows(_Remembers):
    """The same with a view of the buffer, which is a buffer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row", self.kept[..., 0, :])

    def forward(self, x: Any, *, is_written: bool) -> Any:  # noqa: ANN401 - tensors
        return super().forward(x, is_written=is_written) + self.row


def _load(model: Any) -> None:  # noqa: ANN401 - a module
    model.load_state_dict({name: 2 * one for name, one in model.state_dict().items()})


def _merge(model: Any) -> None:  # noqa: ANN401 - a module
    with torch.no_grad():
        model[0].weight += torch.ones(HIDDEN, 1) @ torch.ones(1, K)


def _move(model: Any) -> None:  # noqa: ANN401 - a module
    model[0].weight.data = model[0].weight.data + 1


def _move_within_its_memory(model: Any) -> None:  # noqa: ANN401 - a module
    """Let the weight be other elements of the array that it is a part of."""
    model[0].weight.data = _pool_of(model)[1]


def _turn(model: Any) -> None:  # noqa: ANN401 - a module
    """Let the elements of the weight have another order."""
    model[0].weight.data = _pool_of(model)[0].reshape(K, HIDDEN).T


def _pool_of(model: Any) -> Any:  # noqa: ANN401 - a module, a tensor
    return model[0].weight.data.as_strided((2, HIDDEN, K), (HIDDEN * K, K, 1))


def _step(model: Any) -> None:  # noqa: ANN401 - a module
    model(sample_x()).sum().backward()
    torch.optim.SGD([model[0].weight], lr=0.1).step()


def _fused_step(model: Any) -> None:  # noqa: ANN401 - a module
    model(sample_x()).sum().backward()
    torch.optim.AdamW([model[0].weight], fused=True).step()


def _move_twice(model: Any) -> None:  # noqa: ANN401 - a module
    """Let the second data be where the first were, as far as the allocator has it."""
    for _ in range(2):
        model[0].weight.data = torch.rand(HIDDEN, K)


def _fused_step_of_another(model: Any) -> None:  # noqa: ANN401 - a module
    """Step on a tensor that shares the memory of the weight, as flattened parameters do."""
    flat = torch.nn.Parameter(model[0].weight.detach().view(-1))
    flat.grad = torch.ones_like(flat)
    torch.optim.AdamW([flat], fused=True).step()


@pytest.mark.parametrize(
    "change",
    [
        _load,
        _merge,
        _move,
        _move_twice,
        _move_within_its_memory,
        _turn,
        _step,
        _fused_step,
        _fused_step_of_another,
    ],
)
def test_a_changed_weight_is_told_once_and_by_name(
    change: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = sample_model().eval(), sample_x()
    model[0].weight.data = torch.stack([model[0].weight.data, torch.rand(HIDDEN, K)])[0]
    compiled = _compiled(model)
    assert not _told(caplog, compiled, x)

    change(model)

    [told] = _told(caplog, compiled, x)
    assert told.startswith("0.weight was changed after the model was compiled")
    with torch.no_grad():
        check(compiled(x), model(x))
    torch._dynamo.reset()  # as the warning says
    assert not _told(caplog, compiled, x)
    with torch.no_grad():
        check(compiled(x), model(x))


def test_the_graphs_of_a_model_are_told_together(caplog: pytest.LogCaptureFixture) -> None:
    class Parts(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = torch.nn.Linear(K, K), torch.nn.Linear(K, K)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            y = self.one(x)
            torch._dynamo.graph_break()
            return self.other(y)

    model, x = Parts().eval(), sample_x()
    compiled = _compiled(model)
    _load(model)
    assert len(_told(caplog, compiled, x)) == 1
    with torch.no_grad():  # a second change of what is known to be old
        model.other.bias += 1
    assert not _told(caplog, compiled, x)


def test_a_call_with_changed_weights_may_be_of_any_size() -> None:
    model = sample_model().eval()
    compiled = _compiled(model, dynamic=True)
    _load(model)
    with torch.no_grad():
        for rows in (3, 5):
            x = torch.rand(rows, K)
            check(compiled(x), model(x))


def test_a_buffer_that_a_graph_writes_is_read_by_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = _Remembers().eval(), sample_x()
    gt.enable(Kernels())
    compiled = torch.compile(model)
    with torch.no_grad():
        for is_written in (True, False, True, False):
            check(compiled(x, is_written=is_written), model(x, is_written=is_written))
            x = x + 1
        model.kept += 1
        check(compiled(x, is_written=False), model(x, is_written=False))
    assert not [one for one in caplog.records if one.name == LOG]


def test_a_buffer_that_was_read_first_is_no_constant_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = _Remembers().eval(), sample_x()
    gt.enable(Kernels())
    compiled = torch.compile(model)
    with torch.no_grad():
        for is_written in (False, True, False):
            check(compiled(x, is_written=is_written), model(x, is_written=is_written))
        assert [one.getMessage().split()[0] for one in caplog.records if one.name == LOG] == [
            "kept"
        ]
        torch._dynamo.reset()  # as the warning says
        for _ in range(3):
            check(compiled(x, is_written=False), model(x, is_written=False))
            model.kept += 1
    assert len([one for one in caplog.records if one.name == LOG]) == 1


@pytest.mark.parametrize("first", [False, True])
def test_a_buffer_that_a_graph_writes_may_be_a_view_of_another(
    first: bool,  # noqa: FBT001 - a value of the test
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, model, like = sample_x(), _RemembersRows().eval(), _RemembersRows().eval()
    like.load_state_dict(model.state_dict())
    gt.enable(Kernels())
    compiled = torch.compile(model)

    with torch.no_grad():
        for place, is_written in enumerate((first, True, False, True, False)):
            y = compiled(x + place, is_written=is_written)
            torch.testing.assert_close(y, like(x + place, is_written=is_written))
            torch.testing.assert_close(model.row, like.row)
    assert "shares memory" in caplog.text


def test_a_convolution_in_float64_is_compiled_with_weights_that_vary(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """PyTorch 2.13 would have oneDNN compute it with a constant w, which has no float64."""
    layers = (torch.nn.Conv2d(4, HIDDEN, 1), torch.nn.BatchNorm2d(HIDDEN))
    model = torch.nn.Sequential(*layers).double().eval()
    x = torch.randn(1, 4, 5, 5, dtype=torch.float64)
    gt.enable(Kernels())
    compiled = torch.compile(model)

    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        layers[0].weight *= 2
        torch.testing.assert_close(compiled(x), model(x))
    assert "convolution in float64" in caplog.text


def test_a_weight_that_is_gone_ends_the_call() -> None:
    plain = frozen_weights.PlainGraph(torch.fx.symbolic_trace(torch.nn.Identity()))
    plain.leave_out([torch.ones(1)], [0])
    with pytest.raises(RuntimeError, match="others are gone"):
        plain([None])


def test_a_statistic_that_changes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, x = (
        torch.nn.Sequential(torch.nn.BatchNorm1d(K), torch.nn.Linear(K, K)).eval(),
        sample_x(),
    )
    compiled = _compiled(model)
    model[0].running_mean += 1
    [told] = _told(caplog, compiled, x)
    assert told.startswith("0.running_mean")


def test_the_wrapper_in_cpp_looks_too(caplog: pytest.LogCaptureFixture) -> None:
    model, x = torch.nn.Linear(K, K).eval(), sample_x()
    compiled = _compiled(model, options={"cpp_wrapper": True})
    assert not _told(caplog, compiled, x)
    _load(model)
    assert len(_told(caplog, compiled, x)) == 1


@pytest.mark.parametrize("how", ["for training", "a new parameter", "without the pass"])
def test_what_is_right_is_not_warned_of(how: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = sample_model().eval(), sample_x()
    compiled = _compiled(model)
    if how == "a new parameter":  # it is compiled anew
        model[0].weight = torch.nn.Parameter(2 * model[0].weight)
    else:
        torch._dynamo.reset()
        if how == "without the pass":
            gt.disable()
        with torch.set_grad_enabled(how == "for training"):
            compiled(x)
            with torch.no_grad():
                model[0].weight *= 2
            check(compiled(x), model(x))
    if how != "for training":
        with torch.no_grad():
            check(compiled(x), model(x))
        assert not _told(caplog, compiled, x)
    assert not [one for one in caplog.records if one.name == LOG]


def test_weights_are_not_kept_alive() -> None:
    weights = {"w": torch.nn.Parameter(torch.ones(3)), "b": torch.nn.Parameter(torch.ones(3))}
    known = frozen_weights.FrozenWeights(weights)
    with torch.no_grad():
        del weights["w"]
        gc.collect()
        assert not known.is_changed
        weights["b"] += 1
    assert known.is_changed


def test_a_weight_with_fewer_elements_is_another() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    known = frozen_weights.FrozenWeights({"w": weight})
    assert not known.is_changed
    weight.data = weight.data[:2]
    assert known.is_changed


def test_weights_of_inference_mode_are_known_by_where_they_lie() -> None:
    with torch.inference_mode():
        weight = torch.ones(3)
    known = frozen_weights.FrozenWeights({"w": weight})
    assert not known.is_changed
    with torch.inference_mode():
        weight.data = torch.ones(3)
    assert known.is_changed
