"""Models that torch.compile compiled with kernels; skipped where PyTorch is not installed."""

import copy
import io
import logging
import pickle
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from gemm_tuner.errors import InvalidInput, InvalidSetting, StoreFailed
from gemm_tuner.store.sql.database import open_database

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
    passed,
    sample_model,
    sample_x,
)

from gemm_tuner.layers.wanted import FoundLayer, WantedLayer  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(6, K), (2, 3, K)])
def test_a_compiled_model_calls_kernels_and_packs_nothing(
    dtype: str, shape: tuple[int, ...]
) -> None:
    model, x = sample_model(dtype).eval(), sample_x(*shape, dtype=dtype)
    with torch.no_grad():
        expected = model(x)
        enabled = gt.enable(Kernels())
        compiled = torch.compile(model)
        check(compiled(x), expected)
        assert operator_calls(compiled, x) == {LINEAR: 2}
    assert len(enabled.report.taken) == 2


def test_a_batch_of_any_size_is_compiled_once() -> None:
    model = sample_model().eval()
    gt.enable(Kernels(rows=(1, "2..64")), dynamic_rows=[1, "2..64"])
    compiled = torch.compile(model, dynamic=True)
    with torch.no_grad():
        compiled(sample_x(5, K))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rows in (2, 3, 17, 64, 65, 100):
                x = sample_x(rows, K)
                check(compiled(x), model(x))
                assert operator_calls(compiled, x).get("gemm_tuner::pack") is None


@pytest.mark.parametrize(
    ("dtype", "dynamic", "beside"),
    [("float32", False, ("mkl",)), ("float32", True, ()), ("bfloat16", False, ())],
)
def test_mkl_runs_where_a_product_of_floats_is_left(
    dtype: str, *, dynamic: bool, beside: tuple[str, ...]
) -> None:
    model = sample_model(dtype).eval()
    source = Kernels(rows=(1, "2..64") if dynamic else None)
    gt.enable(source, dynamic_rows=[1, "2..64"])
    with torch.no_grad():
        torch.compile(model, dynamic=dynamic)(sample_x(5, K, dtype=dtype))
    assert {one.beside for one in source.asked} == {beside}


def test_training_is_compiled_as_before() -> None:
    model, x = sample_model(), sample_x()
    plain = copy.deepcopy(model)
    gt.enable(Kernels())
    torch.compile(model)(x).sum().backward()
    plain(x).sum().backward()
    for name, parameter in model.named_parameters():
        check(parameter.grad, plain.get_parameter(name).grad)


def test_what_is_compiled_for_training_is_neither_taken_nor_tuned() -> None:
    source = Kernels()
    enabled = gt.enable(source, tune="wait")
    torch.compile(sample_model().eval())(sample_x())  # without torch.no_grad, by mistake
    assert source.asked == []
    assert not enabled.report.taken
    assert "for inference, call the model under torch.no_grad()" in str(enabled.report)


def test_a_layer_on_the_fast_path_is_told_and_what_to_do_lets_it_be_taken() -> None:
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.ones(2, 4, 16)
    with torch.no_grad():
        on_it = gt.enable(Kernels())
        torch.compile(encoder)(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            off_it = gt.enable(Kernels())
            torch._dynamo.reset()
            torch.compile(encoder)(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert "torch.backends.mha.set_fastpath_enabled(False)" in str(on_it.report)
    assert not on_it.report.taken
    assert off_it.report.taken


def test_a_source_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, x = sample_model().eval(), sample_x()
    gt.enable(Kernels(error=StoreFailed("the disk is gone")))
    with caplog.at_level(logging.WARNING, "gemm_tuner"), torch.no_grad():
        check(torch.compile(model)(x), model(x))
    assert [record for record in caplog.records if "the disk is gone" in record.getMessage()]
    assert len([one for one in caplog.records if one.name.startswith("gemm_tuner")]) == 1


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize("was_timed", [True, False])
def test_a_layer_that_lost_its_race_is_no_warning(
    caplog: pytest.LogCaptureFixture, *, was_timed: bool
) -> None:
    class Losing(Kernels):
        def find(self, wanted: WantedLayer) -> FoundLayer:
            is_whole = wanted.epilogue.endswith("+relu")
            reason = "the baseline is to be used." if is_whole else "nothing was tuned."
            fastest = ("mkl",) if is_whole and was_timed else ()
            return FoundLayer(kernels=(), reasons=(reason,), fastest=fastest)

    model, x = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.ReLU()).eval(), sample_x()
    tuned = gt.enable(Losing())
    with caplog.at_level(logging.INFO, "gemm_tuner"), torch.no_grad():
        torch.compile(model)(x)
    level = logging.INFO if was_timed else logging.WARNING
    assert [one.levelno for one in caplog.records if "baseline" in one.getMessage()] == [level]
    assert [one.is_taken for one in tuned.report] == [False]


def _is_pickled(setting: object) -> bool:
    try:
        pickle.dumps(setting)
    except Exception:  # noqa: BLE001 - of pybind11, it is a RuntimeError
        return False
    return True


def test_a_compiled_model_is_saved_without_its_source(tmp_path: Path) -> None:
    settings = torch._inductor.config.get_config_copy()
    left_by_others = {name: one for name, one in settings.items() if not _is_pickled(one)}
    assert not left_by_others  # or what torch.compile returns could not be saved
    model, x, file = sample_model().eval(), sample_x(), io.BytesIO()
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    open_database(url).dispose()
    enabled = gt.enable(url)
    with torch.no_grad():
        expected = model(x)
        torch.save(torch.compile(model), file)
        gt.enable(Kernels())
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        check(loaded(x), expected)
        assert operator_calls(loaded, x) == {LINEAR: 2}  # as it is compiled from now on
    assert pickle.loads(pickle.dumps(enabled)) is None  # noqa: S301 - made here


def test_rows_that_only_the_run_knows_are_left_or_asked_for() -> None:
    class Chosen(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(K, N)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            return torch.relu(self.linear(x[(x[:, 0] > 0).nonzero().squeeze(1)]))

    model, x = Chosen().eval(), sample_x()
    for rows, is_taken in (((), False), ((1, "2..64"), True)):
        torch._dynamo.reset()
        tuned = gt.enable(Kernels(rows=rows or (6,)), dynamic_rows=rows)
        with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            compiled = torch.compile(model, fullgraph=True)
            for sign in (1, -1):
                check(compiled(x * sign), model(x * sign))
        assert [one.is_taken for one in tuned.report] == [is_taken]


class _Branch(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(K, N), torch.nn.Linear(K, N)

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        return torch.cond(x.sum() > 0, self.one, self.other, (x,))


class _BranchOfOne(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """A branch reads as many arrays as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(sample_x(K, K))

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        linear = torch.nn.functional.linear
        return torch.cond(
            x.sum() > 0, lambda x: linear(x, self.w), lambda x: linear(x, -self.w), (x,)
        )


@pytest.mark.parametrize("kind", [_Branch, _BranchOfOne])
@pytest.mark.usefixtures("loops_by_operators")
def test_products_in_branches_are_left(kind: Any) -> None:  # noqa: ANN401 - a class
    model, x = kind().eval(), sample_x()
    gt.enable(Kernels())
    with torch.no_grad():
        compiled = torch.compile(model)
        for sign in (1, -1):
            check(compiled(x * sign), model(x * sign))
            assert not operator_calls(compiled, x * sign)


def test_a_layer_is_tuned_also_where_it_was_asked_for_as_a_part() -> None:
    class Tuning(Kernels):
        def find(self, wanted: WantedLayer) -> FoundLayer:
            if wanted not in tuned:
                return FoundLayer(kernels=(), reasons=("never tuned.",))
            return super().find(wanted)

        def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:  # noqa: ARG002 - as in Source
            assert budget_s == 3
            if wanted.epilogue == "bias+relu":
                raise StoreFailed("the disk is gone")
            tuned.append(wanted)

    tuned: list[WantedLayer] = []
    model = torch.nn.Sequential(torch.nn.Linear(K, K), torch.nn.ReLU(), torch.nn.Linear(K, K))
    report = gt.enable(Tuning(), tune="wait", budget_s=3)
    x = sample_x()
    with torch.no_grad():
        check(torch.compile(model)(x), model(x))
    assert [one.epilogue for one in tuned] == ["bias"]
    assert [one.is_taken for one in report.report] == [False, True]


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize("way", ["enable", "replace"])
def test_layers_are_tuned_while_a_model_runs(way: str) -> None:
    class Tuning(Kernels):
        def find(self, wanted: WantedLayer) -> FoundLayer:
            if wanted not in tuned:
                return FoundLayer(kernels=(), reasons=("never tuned.",))
            return super().find(wanted)

        def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:
            assert (budget_s, is_quiet) == (3, True)
            assert may_tune.wait(30)
            tuned.append(wanted)
            has_tuned.set()

    tuned: list[WantedLayer] = []
    may_tune, has_tuned = Event(), Event()
    model, x, source = torch.nn.Linear(K, HIDDEN).eval(), sample_x(), Tuning()
    with torch.no_grad():
        expected = model(x)
        if way == "enable":
            gt.enable(source, tune="background", budget_s=3)
            check(torch.compile(model)(x), expected)
            assert not operator_calls(torch.compile(model), x)
        else:
            [report] = gt.replace(model, x, source=source, tune="background", budget_s=3)
            assert not report.is_taken
        may_tune.set()
        assert has_tuned.wait(30)
        if way == "enable":
            torch._dynamo.reset()
            compiled = torch.compile(model)
            check(compiled(x), expected)
            assert operator_calls(compiled, x) == {LINEAR: 1}
        else:
            [report] = gt.replace(model, x, source=source, tune="background", budget_s=3)
            assert report.is_taken
            check(model(x), expected)


@pytest.mark.parametrize("rows", ["1..64", ["many"], [-1]])
def test_rows_that_are_none_are_refused(rows: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidInput):
        gt.enable(Kernels(), dynamic_rows=rows)


def test_kernels_that_are_in_nothing_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="no kernel is in what was compiled"):
        gt.enable(Kernels()).write_kernels(tmp_path)


@pytest.mark.parametrize("rows", [("1..4",), None])
def test_weights_of_columns_first_are_compiled(rows: tuple[str] | None) -> None:
    w, bias, x = torch.nn.Parameter(sample_x(K, N)), torch.nn.Parameter(sample_x(N)), sample_x()

    class Conv1D(torch.nn.Module):  # type: ignore[misc]  # as in models of transformers
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = w, bias

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            return torch.addmm(self.bias, x, self.weight)

    source = Kernels(rows=rows)
    tuned = gt.enable(source)
    with torch.no_grad():
        compiled = torch.compile(Conv1D())
        check(compiled(x), x @ w + bias)
        assert operator_calls(compiled, x) == {LINEAR: 1}
    assert [one.is_taken for one in tuned.report] == [True]


@pytest.mark.usefixtures("loops_by_operators")
@pytest.mark.parametrize(
    ("compute", "calls"),
    [
        (lambda w, b, x: torch.addmm(b, x, w.T), 1),
        (lambda w, b, x: torch.addmm(b * float("nan"), x, w.T, beta=0), 0),
        (lambda w, b, x: torch.addmm(b, x, w.T, alpha=0.5), 0),
        (lambda w, b, x: torch.addmm(b.expand(6, N), x, w.T), 0),
        (lambda w, b, x: torch.addmm(b[:1], x, w.T), 0),
        (lambda w, b, x: b + x @ w.T, 1),
        (lambda w, b, x: (w @ x.T).T + b, 0),
        (lambda w, b, x: torch.nn.functional.linear(x.T.contiguous().T, w, b), 1),
        (lambda w, b, x: torch.nn.functional.linear(x.repeat(1, 2)[:, ::2], w, b), 1),
        (lambda w, b, x: torch.nn.functional.linear(x.expand(2, 6, K), w, b), 1),
        (lambda w, b, x: torch.nn.functional.linear(x[:0], w, b), 0),
        (lambda w, b, x: torch.nn.functional.linear(x[0], w, b), None),
        (lambda w, b, x: torch.bmm(x.expand(2, 6, K), w.T.expand(2, K, N)) + b, None),
        (lambda w, b, x: torch.nn.functional.linear(x[:, :8], w[:, 8:16], b), None),
        (lambda w, b, x: torch.einsum("mk,nk->mn", x, w) + b, None),
    ],
)
def test_products_are_computed_however_they_are_written(compute: Any, calls: int | None) -> None:  # noqa: ANN401
    """`calls` is None where either way is right."""

    class Written(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = torch.nn.Parameter(sample_x(N, K)), torch.nn.Parameter(sample_x(N))

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            return compute(self.w, self.b, x)

    model, x = Written(), sample_x()
    gt.enable(Kernels())
    with torch.no_grad():
        compiled = torch.compile(model)
        check(compiled(x), model(x))
        if calls is not None:
            assert operator_calls(compiled, x).get(LINEAR, 0) == calls


def test_autocast_and_inference_mode_are_compiled() -> None:
    layers = torch.nn.Linear(K, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, K)
    block, x = torch.nn.Sequential(*layers).eval(), sample_x()
    source = Kernels()
    gt.enable(source)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(block)
        check(compiled(x), block(x))
        assert operator_calls(compiled, x) == {LINEAR: 2}
    assert {one.dtype for one in source.asked} == {"bf16"}


@pytest.mark.parametrize(
    "compute",
    [
        torch.nn.functional.linear,
        lambda x, w, b: x @ w.T + b,
        lambda x, w, b: torch.addmm(b, x, w.T),
        lambda x, w, b: torch.matmul(x.view(2, 3, K), w.mT) * b,
        lambda x, w, _b: torch.mm(x, w.view(K, N)),
        lambda x, w, b: torch.nn.functional.linear(x[:, :12], w.chunk(2, 1)[1], b),
        lambda x, w, b: torch.conv2d(x.view(2, 3, 1, K).permute(0, 3, 1, 2), w[..., None, None], b),
    ],
)
def test_weights_that_autocast_casts_are_constants(compute: Any) -> None:  # noqa: ANN401
    w, b, x = sample_x(N, K), sample_x(N), sample_x()
    enabled = gt.enable(Kernels())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        graph = passed(enabled, lambda x: compute(x, w, b), x)
        check(graph(x), compute(x, w, b))
    assert [one.problem.split()[0] for one in enabled.report.taken] == ["bf16"]
    assert not enabled.report.left
