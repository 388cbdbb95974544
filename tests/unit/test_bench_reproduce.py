"""A call of a kernel in a folder, and the script that makes it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.reproduce import KernelCall, main, read_call, write_call
from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import load_kernel
from gemm_tuner.space.catalog import family_named


def _call(types: str) -> KernelCall:
    problem = Problem.parse(f"{types} 6x20x9 nk bias+add+relu")
    candidate = Candidate.parse(f"scalar_{types}_2x2 mc6_nc20_kc9 jc_ic_jr_ir")
    family = family_named(candidate.micro_kernel.family)
    build = compile_kernel(
        render(problem, candidate, family), isa=family.isa, toolchain=find_toolchain()
    )
    kernel = load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu())
    inputs = make_inputs(problem, InputKind.NORMAL, 1)
    return KernelCall(kernel=kernel, x=inputs.x, w=inputs.w, operands=inputs.operands, parts=2)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a call that is right."""
    folder = tmp_path_factory.mktemp("calls") / "right"
    write_call(_call("f32"), folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(written, tmp_path / "call"))


@pytest.mark.parametrize("types", ["f32", "bf16"])
def test_a_call_is_read_as_it_was_written(types: str, tmp_path: Path) -> None:
    call = _call(types)
    write_call(call, tmp_path)
    again = read_call(tmp_path)

    assert again.kernel.artifact == call.kernel.artifact
    assert np.array_equal(again.result, call.result)
    assert again.error is None
    assert main(tmp_path) == 0


def test_weights_that_were_packed_otherwise_are_wrong(tmp_path: Path) -> None:
    call = _call("f32")
    other = KernelCall(
        kernel=call.kernel,
        x=call.x,
        w=call.w,
        operands=call.operands,
        packed=np.asarray(call.kernel.pack(2 * call.w).memory),
    )
    write_call(other, tmp_path)

    ran = subprocess.run(
        [sys.executable, str(tmp_path / "reproduce.py")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 1, ran.stderr
    assert call.kernel.artifact.sha256 in ran.stdout
    assert "elements are wrong; y[" in ran.stdout


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("kernel.so", b"damaged", "nothing was loaded"),
        ("call.json", b"{}", "damaged"),
        ("call.json", b"[", "damaged"),
        ("call.json", b"[" * 100_000, "damaged"),
        ("operands.npz", b"PK damaged", "damaged"),
        ("operands.npz", b"", "damaged"),
        ("operands.npz", None, "No such file"),
    ],
)
def test_damaged_files_are_told(
    folder: Path,
    name: str,
    content: bytes | None,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)

    assert main(folder) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "array", "told"),
    [
        ("x", np.zeros((6, 3), np.float32), "x has"),
        ("w", np.zeros((8, 9), np.float32), "w has"),
        ("bias", np.zeros(3, np.float32), "bias has"),
        ("add", None, "reads bias, add"),
        ("packed", np.zeros(3, np.uint8), "packed has 3 of uint8"),
    ],
)
def test_arrays_of_another_shape_are_no_wrong_kernel(
    folder: Path,
    name: str,
    array: NDArray[Any] | None,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = folder / "operands.npz"
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files if key != name}
    if array is not None:
        arrays[name] = array
    np.savez(path, allow_pickle=False, **arrays)

    assert main(folder) == 2
    assert told in capsys.readouterr().err


def test_a_cpu_that_lacks_a_feature_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = json.loads((folder / "call.json").read_text())
    facts["artifact"]["required_isa"] = [feature.value for feature in IsaFeature]
    (folder / "call.json").write_text(json.dumps(facts))

    assert main(folder) == 2
    assert "which this CPU lacks" in capsys.readouterr().err
