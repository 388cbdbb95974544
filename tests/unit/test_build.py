import ctypes
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import pytest

from gemm_tuner.build import compile as compile_module
from gemm_tuner.build.compile import compile_hosted, compile_kernel
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.source import Source
from gemm_tuner.errors import (
    CompilationFailed,
    CompilationInterrupted,
    InvalidSetting,
    StoreFailed,
    ToolchainMissing,
)
from gemm_tuner.space.catalog import family_named

COMPILERS = ("gcc", "clang", "zig")
# What the cache keeps is not looked into: a kernel would take longer.
SMALL = Source(text='extern "C" __attribute__((visibility("default"))) int four() { return 4; }\n')


@pytest.fixture(params=COMPILERS)
def toolchain(request: pytest.FixtureRequest) -> Toolchain:
    try:
        return find_toolchain(request.param)
    except ToolchainMissing as missing:
        pytest.skip(str(missing))


def kernel_source() -> Source:
    candidate = Candidate.parse("avx512_f32_2x32 mc64_nc64_kc64 jc_ic_jr_ir")
    problem = Problem.parse("f32 64x64x64 nk bias+gelu_erf")
    return render(problem, candidate, family_named("avx512_f32"))


def test_same_source_gives_the_same_bytes(
    toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isa = family_named("avx512_f32").isa
    built = compile_kernel(kernel_source(), isa=isa, toolchain=toolchain)
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(tmp_path))

    assert compile_kernel(kernel_source(), isa=isa, toolchain=toolchain) == built


@pytest.mark.parametrize("damage", ["truncated", "emptied", "changed"])
def test_a_damaged_file_of_the_cache_is_built_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(tmp_path))
    toolchain = find_toolchain()
    built = compile_kernel(SMALL, isa=frozenset(), toolchain=toolchain)
    (file,) = (tmp_path / "builds").glob("kernel-*.so")
    whole = file.read_bytes()
    changed = bytes([*whole[:1000], whole[1000] ^ 1, *whole[1001:]])
    file.write_bytes({"truncated": whole[:-100], "emptied": b"", "changed": changed}[damage])

    again = compile_kernel(SMALL, isa=frozenset(), toolchain=toolchain)

    assert again == built
    assert file.read_bytes() == whole


def test_a_file_of_the_cache_is_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(tmp_path))
    toolchain = find_toolchain()
    built = compile_kernel(SMALL, isa=frozenset(), toolchain=toolchain)
    monkeypatch.setattr("gemm_tuner.build.compile._build", None)

    assert compile_kernel(SMALL, isa=frozenset(), toolchain=toolchain) == built


def test_what_is_compiled_afresh_is_not_looked_for_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(tmp_path))
    binaries = iter([b"first", b"second"])
    monkeypatch.setattr("gemm_tuner.build.compile._build", lambda *_args: next(binaries))
    toolchain = Toolchain(name="gcc", version="12.2.0", command=("gcc",))

    built = [
        compile_kernel(Source(text="//"), isa=frozenset(), toolchain=toolchain, is_afresh=afresh)
        for afresh in (False, False, True, False)
    ]

    assert [one.binary for one in built] == [b"first", b"first", b"second", b"second"]


def test_a_truncated_driver_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(tmp_path))
    text, toolchain = "int four(void) { return 4; }\n", find_toolchain()
    path = compile_hosted(text, name="four", toolchain=toolchain)
    path.write_bytes(path.read_bytes()[:-2000])

    library = ctypes.CDLL(str(compile_hosted(text, name="four", toolchain=toolchain)))

    assert library.four() == 4


def test_of_those_who_want_a_driver_at_once_one_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(tmp_path))
    both, builds = Barrier(2), []

    def build(text: str, *_others: object) -> bytes:
        builds.append(text)
        with suppress(BrokenBarrierError):
            both.wait(timeout=0.3)  # for the other one, if it builds too
        return b"built"

    monkeypatch.setattr("gemm_tuner.build.compile._build", build)
    toolchain = Toolchain(name="gcc", version="12.2.0", command=("gcc",))

    with ThreadPoolExecutor() as pool:
        ways = [
            pool.submit(compile_hosted, "int x;", name="x", toolchain=toolchain) for _ in range(2)
        ]
        paths = {way.result() for way in ways}

    assert builds == ["int x;"]
    assert len(paths) == 1


def test_who_finds_a_driver_waits_for_nobody_who_builds_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(tmp_path))
    monkeypatch.setattr("gemm_tuner.build.compile._build", lambda *_others: b"built")
    ask = partial(compile_hosted, name="x", toolchain=find_toolchain())
    path = ask("int x;")

    def wait(*_others: object) -> None:
        pytest.fail("it waited")

    monkeypatch.setattr("gemm_tuner.build.compile.building", wait)

    assert ask("int x;") == path


def test_where_nothing_can_be_locked_a_driver_is_built_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(tmp_path))
    (tmp_path / "builds" / "four.lock").mkdir(parents=True)
    (tmp_path / "builds").chmod(0o700)

    path = compile_hosted("int four;", name="four", toolchain=find_toolchain())

    assert path.is_file()


def test_binary_names_no_path_and_needs_no_library(toolchain: Toolchain) -> None:
    binary = compile_kernel(
        kernel_source(), isa=family_named("avx512_f32").isa, toolchain=toolchain
    ).binary

    assert os.fsencode(os.path.expanduser("~")) not in binary  # noqa: PTH111 - bytes are searched
    assert b"/tmp" not in binary
    assert b"libc.so" not in binary
    assert b"GLIBC" not in binary


def test_error_shows_the_line_of_the_source(toolchain: Toolchain) -> None:
    broken = Source(text="int fine;\nint f() { return missing_name; }\nint also_fine;\n")

    with pytest.raises(CompilationFailed, match=r"missing_name.*line 2") as failure:
        compile_kernel(broken, isa=frozenset(), toolchain=toolchain)

    assert ">     2 | int f() { return missing_name; }" in str(failure.value)


def test_kernel_that_needs_a_library_is_refused(toolchain: Toolchain) -> None:
    needy = Source(
        text='extern "C" void *malloc(unsigned long);\n'
        '__attribute__((visibility("default"))) void *f() { return malloc(8); }\n'
    )

    with pytest.raises(CompilationFailed, match="malloc"):
        compile_kernel(needy, isa=frozenset(), toolchain=toolchain)


def test_hosted_library_uses_libc(toolchain: Toolchain) -> None:
    text = "#include <string.h>\nint length(const char *t) { return (int)strlen(t); }\n"

    library = ctypes.CDLL(str(compile_hosted(text, name="length", toolchain=toolchain)))

    assert library.length(b"four") == 4


def test_killed_compiler_says_nothing_of_the_source() -> None:
    killed = Toolchain(name="gcc", version="0", command=("/bin/sh", "-c", "kill -9 $$", "sh"))

    with pytest.raises(CompilationInterrupted, match="signal"):
        compile_kernel(kernel_source(), isa=frozenset(), toolchain=killed)


def test_a_full_disk_says_nothing_of_the_source() -> None:
    script = "echo 'fatal error: error writing to x.o: No space left on device' >&2; exit 1"
    without_space = Toolchain(name="gcc", version="0", command=("/bin/sh", "-c", script))

    with pytest.raises(CompilationInterrupted, match="set TMPDIR"):
        compile_kernel(kernel_source(), isa=frozenset(), toolchain=without_space)


def test_no_place_to_work_says_nothing_of_the_source(
    toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))

    with pytest.raises(CompilationInterrupted, match="set TMPDIR"):
        compile_kernel(kernel_source(), isa=frozenset(), toolchain=toolchain)


def test_missing_executable_says_nothing_of_the_source() -> None:
    missing = Toolchain(name="gcc", version="0", command=("/nonexistent/g++",))

    with pytest.raises(CompilationInterrupted, match="could not be run"):
        compile_kernel(kernel_source(), isa=frozenset(), toolchain=missing)


def test_an_interrupt_ends_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupt(process: subprocess.Popen[bytes], _seconds: float) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_module, "wait_for_session", interrupt)
    hanging = Toolchain(name="gcc", version="0", command=("/bin/sh", "-c", "sleep 100", "sh"))

    with pytest.raises(KeyboardInterrupt):
        compile_kernel(kernel_source(), isa=frozenset(), toolchain=hanging)

    assert started[0].returncode == -signal.SIGKILL


def test_unknown_compiler_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="'icc'"):
        find_toolchain("icc")


def test_missing_compiler_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ToolchainMissing, match="gcc"):
        find_toolchain("gcc")


def test_unwritable_cache_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(blocked / "cache"))

    with pytest.raises(StoreFailed, match="GEMM_TUNER_CACHE"):
        compile_kernel(kernel_source(), isa=frozenset(), toolchain=find_toolchain())
