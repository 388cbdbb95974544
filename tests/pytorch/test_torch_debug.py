"""The layer of a model that is wrong is found; skipped where PyTorch is not installed."""

import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import InvalidSetting, StoreFailed

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import RETURN, TAIL, Kernels, kernel_of, with_wrong_tail  # noqa: E402 - after PyTorch was found
from torch_samples import K, N, sample_model, sample_x  # noqa: E402

from gemm_tuner.layers.wanted import FoundLayer, WantedLayer  # noqa: E402
from gemm_tuner.torch.inductor.epilogues import Step, steps_after  # noqa: E402

HEADS, WIDTH, ODD_WIDTH, TOKENS = 2, 64, 83, 5
WRONG_LAYER = "blocks.1.up"


class Block(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """A block of an encoder such as BERT's."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (torch.nn.Linear(K, K) for _ in range(4))
        self.up, self.down = torch.nn.Linear(K, hidden), torch.nn.Linear(hidden, K)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(K) for _ in range(2))

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        q, k, v = (
            one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        x = self.norms[0](x + self.out(attended.transpose(1, 2).flatten(-2)))
        return self.norms[1](x + self.down(torch.nn.functional.gelu(self.up(x))))


class Encoder(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Blocks, of which the second alone has a hidden layer of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(*map(Block, (WIDTH, ODD_WIDTH, WIDTH)))

    def forward(self, x: Any) -> dict[str, Any]:  # noqa: ANN401 - a tensor
        hidden = self.blocks(x)
        return {"hidden": hidden, "pooled": (hidden.mean(1), TOKENS)}


def _x(dtype: str = "float32") -> Any:  # noqa: ANN401 - a tensor
    return sample_x(3, TOKENS, K, dtype=dtype)


@dataclass
class Planted(Kernels):
    """Has a wrong kernel for the layer of the odd width, and keeps its source."""

    plant: Callable[[str], str] = with_wrong_tail
    computes: str = ""  # the epilogue that the wrong kernel computes, if another

    def find(self, wanted: WantedLayer) -> FoundLayer:
        """Return a kernel."""
        if wanted.n != ODD_WIDTH:
            return super().find(wanted)
        epilogue = self.computes or wanted.epilogue
        problem = Problem.create(
            wanted.rows[0], wanted.n, wanted.k, dtype=wanted.dtype, epilogue=epilogue
        )

        def plant(text: str) -> str:
            named = text.replace(f' {epilogue}\\"', f' {wanted.epilogue}\\"')
            self.source = self.plant(named)
            return self.source

        return FoundLayer(kernels=(kernel_of(problem, wanted.threads, plant),), reasons=())

    def source_text(self, _sha256: str) -> str | None:
        """Return the C++ of the wrong kernel."""
        return self.source


def _reproduced(folder: Path) -> tuple[int, str]:
    """Return the exit code and the words of the script in a folder, where PyTorch is missing."""
    without = "import sys, runpy; sys.modules['torch'] = None; sys.argv = sys.argv[1:]; "
    script = str(folder / "wrong_call" / "reproduce.py")
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            without + "runpy.run_path(sys.argv[0], run_name='__main__')",
            script,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_kernel_of_a_replaced_model_is_named(dtype: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model, x = Encoder().to(getattr(torch, dtype)).eval(), _x(dtype)
    source = Planted()
    gt.replace(model, x, source=source)

    found = gt.debug(model, x, folder=tmp_path / "found")

    assert found.wrong == WRONG_LAYER
    wrong, *others = found.layers
    assert wrong.name == WRONG_LAYER
    assert wrong.share > 1
    assert all(one.share <= 1 and not one.why_wrong and one.seconds > 0 for one in others)
    assert len(others) == 17 + 3  # and the attention of each block
    assert "wrong by itself" in found.verdict
    code, told = _reproduced(found.folder)
    assert code == 1, told
    assert f"y[14, {ODD_WIDTH - 1}]" in told
    assert (found.folder / "wrong_call" / "operands.npz").stat().st_size < 4096
    assert wrong.why_wrong in (found.folder / "index.md").read_text()


@pytest.mark.usefixtures("loops_by_operators")
def test_a_wrong_function_of_a_compiled_model_is_named(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model, x = Encoder().eval(), _x()
    source = Planted(plant=lambda text: text, computes="bias+gelu_tanh")
    tuned = gt.enable(source)

    found = gt.debug(model, x, folder=tmp_path, tolerance=1e-5)

    assert found.wrong == WRONG_LAYER, found
    assert _reproduced(tmp_path)[0] == 1
    assert (tmp_path / "wrong_call" / "kernel.cpp").read_text() == source.source
    assert "gemm_tuner.linear" in (tmp_path / "graphs" / "1_after.txt").read_text()
    assert "gemm_tuner.linear" not in (tmp_path / "graphs" / "1_before.txt").read_text()
    assert not tuned.report


@pytest.mark.parametrize(
    ("behind", "told"),
    [
        ('call.y[1] = __builtin_nanf("");\n', r"y\[0, 1\] is nan"),
        ("static int calls; if (calls++) call.y[0] = call.y[1];\n", "right when it makes the same"),
        ("call.y[0] = call.x[0] == 7 ? call.y[1] : call.y[0];\n", r"y\[0, 0\]"),
    ],
)
def test_kernels_that_are_wrong_at_times_are_found(behind: str, told: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model, x = torch.nn.Linear(K, ODD_WIDTH), sample_x()
    x[0, 0] = 7
    head = "    const Call call = read_args(*args, 0);\n    "
    source = Planted(plant=lambda text: text.replace(RETURN, head + behind + RETURN))
    gt.replace(model, x, source=source)
    with torch.no_grad():
        model(x)

    found = gt.debug(torch.nn.Sequential(model), x, folder=tmp_path)

    assert found.wrong == "0"
    assert re.search(told, found.verdict)
    is_alone = "right when" not in told
    assert (tmp_path / "wrong_call").exists() == is_alone
    if is_alone:
        assert _reproduced(tmp_path)[0] == 1


@pytest.mark.usefixtures("loops_by_operators")
def test_a_wrong_product_of_a_batch_is_named(tmp_path: Path) -> None:
    class Experts(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(sample_x(2, K, ODD_WIDTH))

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
            return torch.relu(torch.bmm(x, self.w))

    torch.set_num_threads(1)
    gt.enable(Planted())

    found = gt.debug(Experts().eval(), sample_x(2, 4, K), folder=tmp_path)

    assert found.wrong == "bmm"
    assert "in product 0 of its batch" in found.verdict
    assert _reproduced(tmp_path)[0] == 1


def test_weights_that_were_written_unseen_are_named(tmp_path: Path) -> None:
    model, x = sample_model().eval(), sample_x()
    gt.replace(model, x, source=Kernels())
    with torch.no_grad():
        model(x)
    model[2].weight.data[N - 1] = 0

    found = gt.debug(model, x, folder=tmp_path)

    assert found.wrong == "2"
    assert "refresh" in found.verdict
    assert _reproduced(tmp_path)[0] == 1
    gt.refresh(model)
    assert gt.debug(model, x).wrong is None


@pytest.mark.usefixtures("loops_by_operators")
def test_weights_that_changed_after_a_model_was_compiled_are_told() -> None:
    model, x = sample_model().eval(), sample_x()
    gt.enable(Kernels())
    compiled = torch.compile(model)
    with torch.no_grad():
        compiled(x)
        model[0].weight.data.mul_(2)  # which raises no version

    found = gt.debug(compiled, x)

    assert found.wrong is None
    assert "compile it after each change" in found.verdict
    assert found.difference > found.tolerance
    assert [one.name for one in found.layers if one.share <= 1] == [
        one.name for one in found.layers
    ]


class _Twice(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    def __init__(self, last: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.inner = torch.nn.Linear(K, K), torch.nn.Linear(K, K)
        self.same, self.last = self.inner, last

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        return self.last(self.same(self.inner(torch.nn.functional.gelu(self.first(x)))))


def test_a_right_model_is_told_to_be() -> None:
    model, x = _Twice(lambda y: {"y": (y, None), "count": 3}).eval(), sample_x()
    x[0, 0] = torch.nan
    gt.replace(model, x, source=Kernels())

    found = gt.debug(model, {"x": x})

    assert found.wrong is None
    assert found.difference <= found.tolerance == 1e-4
    assert "No layer is wrong" in str(found)
    assert {one.name: one.calls for one in found.layers} == {"first": 1, "inner": 2}


def test_threads_debug_one_after_the_other() -> None:
    def debug(_number: int) -> list[tuple[str | None, int]]:
        model, x = torch.nn.Sequential(torch.nn.Linear(K, K)), sample_x()
        gt.replace(model, x, source=Kernels())
        found = [gt.debug(model, x) for _ in range(3)]
        return [(one.wrong, layer.calls) for one in found for layer in one.layers]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(debug, range(3))) == [[(None, 1)] * 3] * 3
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_calls_of_other_threads_are_not_judged() -> None:
    def call_elsewhere(y: Any) -> Any:  # noqa: ANN401 - a tensor
        with ThreadPoolExecutor(1) as pool, torch.no_grad():
            pool.submit(lambda: model.first(x)).result()
        return y

    model, x = _Twice(call_elsewhere).eval(), sample_x()
    gt.replace(model, x, source=Kernels())

    assert {one.name: one.calls for one in gt.debug(model, x).layers} == {"first": 1, "inner": 2}


@pytest.mark.usefixtures("loops_by_operators")
def test_layers_that_are_compiled_by_themselves_are_told_apart() -> None:
    model = torch.nn.Sequential(*(torch.compile(torch.nn.Linear(K, K)) for _ in range(2)))
    gt.enable(Kernels())

    layers = gt.debug(model, sample_x()).layers

    assert sorted(one.name for one in layers) == ["addmm", "addmm (2)"]


def test_errors_that_add_up_are_told() -> None:
    class Rounding(Kernels):
        """Has kernels that are a bit or two off, where those of this CPU round as PyTorch does."""

        def find(self, wanted: WantedLayer) -> FoundLayer:
            rounds = TAIL.replace("n - 2]", "n - 1] * 1.0000002f")
            problem = Problem.create(
                wanted.rows[0], wanted.n, wanted.k, dtype=wanted.dtype, epilogue=wanted.epilogue
            )
            kernel = kernel_of(
                problem, wanted.threads, lambda text: text.replace(RETURN, rounds + RETURN)
            )
            return FoundLayer(kernels=(kernel,), reasons=())

    model, x = _Twice(lambda y: torch.sin(1e7 * y)).eval(), sample_x()
    gt.replace(model, x, source=Rounding())

    found = gt.debug(model, x)

    assert found.wrong is None
    assert "Errors add up" in found.verdict


@pytest.mark.usefixtures("loops_by_operators")
def test_a_wrong_graph_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _Twice(lambda y: y).eval(), sample_x()

    def wrong_steps(node: Any, **options: Any) -> list[Step]:  # noqa: ANN401 - of PyTorch
        return [replace(one, name="silu") for one in steps_after(node, **options)]

    monkeypatch.setattr("gemm_tuner.torch.inductor.chains.steps_after", wrong_steps)
    gt.enable(Kernels())

    found = gt.debug(model, x)

    assert found.wrong is None
    assert "what differs is the graph" in found.verdict


@pytest.mark.usefixtures("loops_by_operators")
def test_a_compiler_that_differs_is_told() -> None:
    model = _Twice(lambda y: y + 1 if torch.compiler.is_compiling() else y).eval()
    gt.enable(Kernels())

    found = gt.debug(model, sample_x())

    assert found.wrong is None
    assert "where torch.compile is used without kernels" in found.verdict
    assert found.difference > 0.1


class _Counting(torch.nn.Linear):  # type: ignore[misc]  # without PyTorch, it is Any
    calls = 0

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        self.calls += 1
        return super().forward(x) * self.calls


def _replaced(*layers: Any, is_training: bool = False) -> Any:  # noqa: ANN401 - modules
    model = torch.nn.Sequential(torch.nn.Linear(K, K), *layers).train(is_training)
    gt.replace(model[0], rows=[6], source=Kernels())
    return model


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            lambda: _replaced(torch.nn.Dropout(), is_training=True),
            r"1 is a Dropout in training.*eval",
        ),
        (lambda: _replaced(torch.nn.BatchNorm1d(K), is_training=True), "BatchNorm1d in training"),
        (lambda: _replaced(_Counting(K, K)), "changes from call to call"),
        (lambda: _replaced(torch.nn.Linear(K, K, device="meta")), "1.weight is on the device meta"),
        (lambda: torch.nn.Linear(K, K), "no layer of the model calls a tuned kernel"),
        (lambda: torch.nn.functional.relu, "of type .*function"),
        (lambda: _Twice(lambda _y: None), "no tensor is found"),
        (lambda: _Twice(lambda y: y.to_sparse()), "of the layout torch.sparse_coo"),
        (lambda: _Twice(lambda y: y.to("meta")), "a tensor on meta"),
        (lambda: _Twice(lambda y: torch.nested.nested_tensor([*y])), "which is not compared"),
    ],
)
def test_models_that_cannot_be_compared_are_refused(model: Any, reason: str) -> None:  # noqa: ANN401
    made = model()
    if isinstance(made, _Twice):
        gt.replace(made, sample_x(), source=Kernels())
    with pytest.raises(InvalidSetting, match=reason):
        gt.debug(made, sample_x())


def test_a_name_does_not_speak_for_what_was_found(tmp_path: Path) -> None:
    model = torch.nn.Sequential()
    model.add_module("\x1b[2J\n```\n# All is well", torch.nn.Linear(K, N))
    gt.replace(model, sample_x(), source=Kernels())

    found = gt.debug(model, sample_x(), folder=tmp_path)

    assert str(found).endswith(rf"\x1b[2J\n```\n# All is well: f32 6x{N}x{K} nk bias")
    assert "\n# All" not in (tmp_path / "index.md").read_text()


def test_arguments_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    model, x = _replaced(), sample_x()
    (tmp_path / "file").touch()
    for arguments, reason in (
        ({"tolerance": -1.0}, "tolerance is -1.0"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
        ({"tolerance": "1"}, "tolerance is '1'"),
        ({"folder": tmp_path}, "is not empty"),
        ({"folder": tmp_path / "file"}, "is not empty"),
        ({"folder": tmp_path / "a\0b"}, "is no path"),
    ):
        with pytest.raises(InvalidSetting, match=reason):
            gt.debug(model, x, **arguments)
    with pytest.raises(InvalidSetting, match="no example inputs"):
        gt.debug(model, [])
    with pytest.raises(InvalidSetting, match="no kernel was called"):
        gt.debug(model, sample_x(7, K))
    with pytest.raises(InvalidSetting, match="on the device meta"):
        gt.debug(model, x.to("meta"))
    with pytest.raises(StoreFailed, match="cannot be written"):
        gt.debug(model, x, folder=tmp_path / "file" / "folder")
