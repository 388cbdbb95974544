"""What one process has compiled with kernels runs in others: Python's, and those without Python."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.errors import InvalidSetting, StoreFailed

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found

from gemm_tuner.torch.inductor import compiling  # noqa: E402
from gemm_tuner.torch.inductor.beside_convolution import Beside  # noqa: E402
from gemm_tuner.torch.inductor.exporting import write_kernels  # noqa: E402

ROOT = Path(__file__).parents[2]
# What is compiled once is not made faster by headers that are compiled before, or by optimising.
COMPILED_ONCE = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}
ROWS, K, HIDDEN, N = 6, 24, 4000, 17  # constants beyond the sizes that malloc keeps in its heap


class _Grouped(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Columns in two groups, each with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(2, K // 2, K // 2))

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        return torch.bmm(x.unflatten(1, (2, -1)).transpose(0, 1), self.w).transpose(0, 1).flatten(1)


class _Attention(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Rows that are added up by how alike they are: two products of activations."""

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        return torch.softmax(x @ x.T / 5, -1) @ x


class _Heads(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Rows that see themselves and those before, by two heads."""

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        heads = x.view(1, ROWS, 2, K // 2).transpose(1, 2)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(heads, heads, heads, is_causal=True).transpose(1, 2).reshape(ROWS, K)


class _OfBytes(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Columns by weights of bytes, with x rounded to bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.randint(-127, 128, (K, K), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(K) / 100)
        self.register_buffer("zero", torch.zeros(K, dtype=torch.int64))

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        ops, how = torch.ops.quantized_decomposed, (0.01, 100, 0, 255, torch.uint8)
        x = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *how), *how)
        w = ops.dequantize_per_channel(self.w, self.scale, self.zero, 0, -127, 127, torch.int8)
        return torch.nn.functional.linear(x, w)


class _Patches(torch.nn.Module):  # type: ignore[misc]  # without PyTorch, it is Any
    """Rows as images, whose patches are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(2, K // 2, (3, 2), stride=(3, 2))

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - a tensor
        return self.patches(x.view(ROWS, 2, 3, 4)).flatten(1)


def _model() -> Any:  # noqa: ANN401 - a module
    # It has the operators of quantised models, and imports Inductor, which warns.
    import torch.ao.quantization.fx._decomposed  # noqa: PLC0415

    torch.manual_seed(3)
    layers = torch.nn.Linear(K, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, N)
    parts = _OfBytes(), _Grouped(), _Patches(), _Attention(), _Heads()
    return torch.nn.Sequential(*parts, *layers).eval()


def _x() -> Any:  # noqa: ANN401 - a tensor
    return torch.linspace(-1, 1, ROWS * K).reshape(ROWS, K)


def _close(y: Any) -> None:  # noqa: ANN401 - a tensor
    with torch.no_grad():
        torch.testing.assert_close(y, _model()(_x()), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The package of a model that was compiled ahead of time, and the operators beside kernels.

    Processes of pytest-xdist share it: the first compiles it.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= "ahead of time"
    with FileLock(f"{folder}.lock"):
        path, written = folder / "model.pt2", folder / "written"
        if not written.exists():
            folder.mkdir(exist_ok=True)
            written.write_text(str(_compile(path, folder / "kernels")))
        return path, Path(written.read_text())


def _compile(path: Path, kernels: Path) -> Path:
    """Compile a model ahead of time, and return the operators beside its kernels."""
    tuned = gt.enable(Kernels())
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        faster = Beside(is_faster=True, reason="")
        patch.setattr(compiling, "is_faster_than_convolution", lambda *_given, **_adds: faster)
        exported = torch.export.export(_model(), (_x(),))
        with torch._inductor.config.patch(COMPILED_ONCE):
            torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
    assert [one.is_taken for one in tuned.report] == [True] * 8
    library: Path = tuned.write_kernels(kernels)
    gt.disable()
    return library


def _in_new_process(script: str, *arguments: str, **variables: str) -> str:
    tests = str(Path(__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path]), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.long
def test_a_program_without_python_runs_it(package: tuple[Path, Path], tmp_path: Path) -> None:
    torch_root = Path(torch.__file__).parent
    program = tmp_path / "run_model"
    folders = [f"-L{torch_root}/lib", f"-Wl,-rpath,{torch_root}/lib", "-Wl,--no-as-needed"]
    libraries = [*folders, "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    source = ROOT / "examples" / "torch" / "run_model.cpp"
    compiler = [*find_toolchain("gcc").command, "-std=c++20", "-isystem", f"{torch_root}/include"]
    command = [*compiler, str(source), "-o", str(program), *libraries, "-lstdc++", "-lm"]
    subprocess.run(command, check=True)

    model, library = map(str, package)
    arguments = [str(program), model, library, str(ROWS), str(K)]
    ran = subprocess.run(arguments, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    _close(torch.tensor([float(line) for line in ran.stdout.split()]).reshape(ROWS, N))


RUN_PACKAGE = """
import sys, torch, gemm_tuner.torch
gemm_tuner.torch.load_kernels(sys.argv[2])
model = torch._inductor.aoti_load_package(sys.argv[1])
with torch.profiler.profile() as profile:
    y = model(torch.linspace(-1, 1, int(sys.argv[3]) * int(sys.argv[4])).reshape(
        int(sys.argv[3]), int(sys.argv[4])))
torch.save((y, [one.key for one in profile.key_averages()]), sys.argv[5])
"""


def test_another_process_of_python_runs_it(package: tuple[Path, Path], tmp_path: Path) -> None:
    model, library = package
    file = str(tmp_path / "y.pt")

    _in_new_process(RUN_PACKAGE, str(model), str(library.parent), str(ROWS), str(K), file)

    y, names = torch.load(file)
    _close(y)
    of_bytes = f"{ROWS}x{K}x{K} nk x_zero_point+channel_scale"
    up, down = f"{ROWS}x{HIDDEN}x{K} nk bias+gelu_erf", f"{ROWS}x{N}x{HIDDEN} nk bias"
    attention = f"attention f32 {ROWS}x{ROWS}x12"
    own = "0.001728 MFLOP, 0.001296 MB"
    assert {one for one in names if one.startswith("gemm-tuner ")} == {
        f"gemm-tuner u8_s8_s32_f32 {of_bytes} (m = {ROWS}, 0.006912 MFLOP, 0.001296 MB)",
        f"gemm-tuner 2 of f32 {ROWS}x12x12 nk none (m = {ROWS}, 0.003456 MFLOP, 0.002304 MB)",
        "gemm-tuner f32 12x12x12 nk bias (m = 12, 0.003456 MFLOP, 0.001728 MB)",  # of patches
        f"gemm-tuner matmul f32 {ROWS}x{ROWS}x{K} nk scale (m = {ROWS}, {own})",
        f"gemm-tuner matmul f32 {ROWS}x{K}x{ROWS} kn none (m = {ROWS}, {own})",
        f"gemm-tuner 2 of {attention} scale+causal (m = {ROWS}, 0.003456 MFLOP, 0.002304 MB)",
        f"gemm-tuner f32 {up} (m = {ROWS}, 1.152 MFLOP, 0.480576 MB)",
        f"gemm-tuner f32 {down} (m = {ROWS}, 0.816 MFLOP, 0.368408 MB)",
    }


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("gemm-tuner layers 3", "gemm-tuner layers 2", "line 1"),
        ("\nlayer ", "\nlayer x", "line 2"),
        ("\nkernel ", "\nkernel ../", "line 3"),
        (".so ", ".so", "line 3"),
        ("kernel ", "kernel of ", "line 3"),
        ("kernel ", "kernel missing", "cannot be loaded"),
        (" fma", " fma,avx9", "needs avx9"),
        ("\nlayer", "\n\nlayer", "line 2"),
    ],
)
def test_damaged_kernels_are_refused(
    package: tuple[Path, Path], tmp_path: Path, old: str, new: str, told: str
) -> None:
    folder = package[1].parent
    text = (folder / "layers.txt").read_text()
    if old == " fma":
        old = " " + text.splitlines()[2].split()[7]
        new = f"{old},avx9"
    assert old in text
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "layers.txt").unlink()
    (tmp_path / "layers.txt").write_text(text.replace(old, new, 1))

    with pytest.raises(InvalidSetting, match=told):
        gt.load_kernels(tmp_path)


def test_folders_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StoreFailed, match=r"Not a directory|File exists"):
        write_kernels(tmp_path / "file", [])
    with pytest.raises(InvalidSetting, match="cannot be read"):
        gt.load_kernels(tmp_path / "nowhere")


COMPILE = """
import json, sys, torch
import gemm_tuner.torch as gt
from torch._dynamo.utils import counters
from torch_kernels import Kernels
K, HIDDEN, N = map(int, sys.argv[1:])
torch.manual_seed(3)
layers = torch.nn.Linear(K, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, N)
model = torch.nn.Sequential(*layers).eval()
x = torch.linspace(-1, 1, 6 * K).reshape(6, K)
tuned = gt.enable(Kernels())
with torch.no_grad():
    expected, y = model(x), torch.compile(model)(x)
torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
print(json.dumps([len(tuned.report.taken), counters["inductor"]["fxgraph_cache_hit"]]))
"""


def test_a_second_process_finds_what_the_first_has_compiled(tmp_path: Path) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    cache["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # or it is compiled what shows that vectors work
    sizes = [str(one) for one in (K, HIDDEN, N)]

    first = json.loads(_in_new_process(COMPILE, *sizes, **cache))
    second = json.loads(_in_new_process(COMPILE, *sizes, **cache))

    assert (first, second) == ([2, 0], [2, 1])
