"""Models in eager mode with parts that torch.compile has compiled, and with recurrent parts."""

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found
from torch_samples import (  # noqa: E402
    HIDDEN,
    LINEAR,
    MODULE,
    K,
    N,
    check,
    operator_calls,
    sample_model,
    sample_x,
)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Compile without Inductor, whose loops are none of what is tested here."""
    with torch._inductor.config.patch(fallback_by_default=True):
        yield


def _in_place(part: Any) -> Any:  # noqa: ANN401 - modules
    part.compile()
    return part


def _forward(part: Any) -> Any:  # noqa: ANN401 - modules
    part.forward = torch.compile(part.forward)
    return part


def _inside(part: Any) -> Any:  # noqa: ANN401 - modules
    return torch.nn.Sequential(torch.compile(part), torch.nn.ReLU())


COMPILED: dict[str, Callable[[Any], Any]] = {
    "torch.compile": torch.compile,
    "compile": _in_place,
    "forward": _forward,
    "inside another": _inside,
}
KINDS: dict[str, Callable[[], Any]] = {
    "a block": lambda: torch.nn.Sequential(torch.nn.Linear(HIDDEN, N), torch.nn.ReLU()),
    "a layer": lambda: torch.nn.Linear(HIDDEN, N),
}


def _model(kind: str, how: str) -> Any:  # noqa: ANN401 - a module
    return torch.nn.Sequential(torch.nn.Linear(K, HIDDEN), COMPILED[how](KINDS[kind]())).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", COMPILED)
def test_layers_of_compiled_parts_are_left(how: str, kind: str) -> None:
    model, x = _model(kind, how), sample_x()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # none of PyTorch's is for our sake
        with torch.compiler.set_stance("force_eager"):
            expected = model(x)

        reports = [gt.replace(model, x, source=Kernels())]  # compiles the part
        with torch._dynamo.config.patch(error_on_recompile=True):
            reports.append(gt.replace(model, x, source=Kernels()))
            reports.append(gt.replace(model, rows=[6], source=Kernels()))
            check(model(x), expected)
        assert operator_calls(model, x) == {LINEAR: 1, MODULE: 1}

    for taken, left in reports:
        assert (taken.name, taken.is_taken, left.is_taken) == ("0", True, False)
        assert left.reason.startswith("it is in a module that torch.compile has compiled")


@pytest.mark.parametrize("how", COMPILED)
def test_their_kernels_are_not_judged(how: str) -> None:
    model, x = _model("a block", how), sample_x()
    source = Kernels()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        gain = gt.tune_model(model, x, source=source, budget_s=0)
    [left] = [one for one in gain.layers if one.names != ("0",)]
    assert not left.is_taken
    assert left.reason.startswith("it is in a module that torch.compile has compiled")
    assert {(one.n, one.k) for one in source.asked} == {(HIDDEN, K)}


def test_what_is_compiled_later_becomes_ordinary() -> None:
    model, x = sample_model().eval(), sample_x()
    with torch.no_grad():
        expected = model(x)
        gt.replace(model, x, source=Kernels())
        model[2].compile()
        freed = gt.free_weights(model)
        assert freed.layers == ("0",)
        assert "torch.compile" in freed.left["2"]
        gt.replace(model, x, source=Kernels())
        assert type(model[2]) is torch.nn.Linear
        check(model(x), expected)


def test_a_part_that_is_not_to_be_compiled_is_none() -> None:
    model, x = _model("a block", "torch.compile"), sample_x()
    model[1] = torch.compiler.disable(model[1]._orig_mod)
    report = gt.replace(model, x, source=Kernels())
    assert len(report.taken) == 2


def test_a_function_that_calls_layers_is_compiled_without_a_warning() -> None:
    class Calling(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = torch.nn.Linear(K, K), torch.nn.Linear(K, N)
            self.compute = torch.compile(lambda x: self.other(x).relu())

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            return self.compute(self.one(x))

    model, x = Calling().eval(), sample_x()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        one, other = gt.replace(model, x, source=Kernels())
        assert (one.is_taken, other.is_taken) == (True, False)
        check(model(x), model.other(model.one(x)).relu())


class Speaking(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """A recurrent module between two layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(K, K), torch.nn.Linear(HIDDEN, N)
        self.l = getattr(torch.nn, kind)(K, HIDDEN)

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        y = self.l(self.first(x))
        return self.last(y[0] if isinstance(y, tuple) else y)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LSTMCell"])
def test_recurrent_modules_have_a_line(kind: str) -> None:
    model, x = Speaking(kind).eval(), sample_x()
    report = gt.replace(model, x, source=Kernels())
    assert [one.name for one in report.taken] == ["first", "last"]
    [left] = report.left
    assert left.text == (
        f"l: left: {kind}: its products are computed inside of PyTorch's operator, which is not "
        "replaced"
    )
    assert report.summary == "2 of 3 layers call tuned kernels"


def test_the_time_of_a_recurrent_module_is_told() -> None:
    model, x = Speaking("LSTM").eval(), sample_x()
    gain = gt.tune_model(model, x, source=Kernels(), budget_s=0)
    [lstm] = [one for one in gain.layers if one.problem == "LSTM"]
    assert (lstm.names, lstm.is_taken) == (("l",), False)
    assert lstm.plain_s > 0


def test_hooks_of_modules_run_while_they_are_looked_into(caplog: pytest.LogCaptureFixture) -> None:
    model, x = sample_model().eval(), sample_x()
    seen: list[str] = []
    model[0].register_forward_pre_hook(lambda *_given: seen.append("before"))
    model[0].register_forward_hook(lambda *_given: seen.append("after"))
    with caplog.at_level(logging.WARNING):
        gt.replace(model, x, source=Kernels())
    assert seen == ["before", "after"]
    assert not any("forward" in vars(one) for one in model.modules())
