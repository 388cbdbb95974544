"""A C program loads a kernel with no Python, calls it and checks the result."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from served import PROBLEM

from gemm_tuner.build.compile import Build, compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.operation import Operation
from gemm_tuner.resources import templates_dir
from gemm_tuner.space.catalog import family_named

EXAMPLE = Path(__file__).parents[2] / "examples" / "c" / "call_kernel.c"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the example, compiled as strict C."""
    path = tmp_path_factory.mktemp("example") / "call_kernel"
    # The C++ drivers compile C too when they are told the language.
    flags = ["-x", "c", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]
    include = ["-I", str(templates_dir() / "abi")]
    subprocess.run(
        [*find_toolchain().command, *flags, *include, str(EXAMPLE), "-o", str(path), "-ldl", "-lm"],
        check=True,
    )
    return path


def _call(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def test_the_result_is_right(program: Path, build: Build, tmp_path: Path) -> None:
    library = tmp_path / "kernel.so"
    library.write_bytes(build.binary)

    completed = _call(program, str(library), str(PROBLEM.m.high), str(PROBLEM.n), str(PROBLEM.k))

    assert completed.returncode == 0, completed.stderr
    assert PROBLEM.text in completed.stdout
    assert "largest error: 0." in completed.stdout


def test_the_result_is_right_where_w_comes_with_the_call(program: Path, tmp_path: Path) -> None:
    problem = replace(PROBLEM, operation=Operation.MATMUL)
    candidate = Candidate.parse("scalar_f32_2x4 mc8_nc32_kc16 jc_ic_jr_ir pack_w")
    family = family_named(candidate.micro_kernel.family)
    source = render(problem, candidate, family)
    build = compile_kernel(source, isa=family.isa, toolchain=find_toolchain())
    library = tmp_path / "kernel.so"
    library.write_bytes(build.binary)

    completed = _call(program, str(library), str(PROBLEM.m.high), str(PROBLEM.n), str(PROBLEM.k))

    assert completed.returncode == 0, completed.stderr
    assert problem.text in completed.stdout


def test_a_library_that_is_no_kernel_is_refused(program: Path, tmp_path: Path) -> None:
    library = tmp_path / "kernel.so"
    library.write_text("not a library")

    completed = _call(program, str(library), "1", "1", "1")

    assert completed.returncode == 1
    assert "does not load" in completed.stderr


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_other_sizes_than_the_kernel_has_are_refused(
    changed: int, program: Path, build: Build, tmp_path: Path
) -> None:
    library = tmp_path / "kernel.so"
    library.write_bytes(build.binary)
    sizes = [PROBLEM.m.high, PROBLEM.n, PROBLEM.k]
    sizes[changed] += 1

    completed = _call(program, str(library), *map(str, sizes))

    assert completed.returncode == 1
    assert "is for another problem" in completed.stderr
    assert '"candidate"' in completed.stderr  # what the library says of itself
