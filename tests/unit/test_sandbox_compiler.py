"""What a compiler can reach: its own folder, and what is installed."""

import os
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gemm_tuner.build.compile import compile_kernel
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.domain.sandbox import SandboxLevel
from gemm_tuner.domain.source import Source
from gemm_tuner.errors import CompilationFailed, InvalidSetting
from gemm_tuner.sandbox import confine, enter

NAMESPACES = confine.look_at_sandbox().level is SandboxLevel.NAMESPACES

needs_namespaces = pytest.mark.skipif(
    not NAMESPACES, reason=f"not reached here: {confine.look_at_sandbox().why}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(tmp_path / "cache"))


def output_of(script: str) -> str:
    """Return what a script prints that is run as a compiler is, behind the head of a library."""
    head = r"printf '\177ELF' > kernel.so"
    command = ("/bin/sh", "-c", f"{head}; ({script}) >> kernel.so 2>&1", "sh")
    compiler = Toolchain(name="gcc", version=script, command=command)
    built = compile_kernel(Source(text=script), isa=frozenset(), toolchain=compiler)
    return built.binary.decode().removeprefix("\x7fELF")


@pytest.mark.parametrize(("choice", "is_refused"), [("auto", True), ("off", False)])
@needs_namespaces
def test_a_source_cannot_take_a_file_of_the_user_into_the_kernel(
    choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_refused: bool
) -> None:
    monkeypatch.setenv("GEMM_TUNER_SANDBOX", choice)
    secret = tmp_path / "key.pem"
    secret.write_text("of the user")
    source = Source(text=f'__asm__(".data\\n.incbin \\"{secret}\\"");\n')

    if is_refused:
        with pytest.raises(CompilationFailed):
            compile_kernel(source, isa=frozenset(), toolchain=find_toolchain())
    else:
        built = compile_kernel(source, isa=frozenset(), toolchain=find_toolchain())
        assert b"of the user" in built.binary


@needs_namespaces
def test_a_compiler_sees_no_network_no_process_and_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GEMM_TUNER_TOKEN", "gt_secret")

    devices = output_of("sed 1,2d /proc/net/dev").split()
    processes = output_of("ls /proc | grep '^[0-9]'").split()

    assert [word for word in devices if word.endswith(":")] == ["lo:"]
    assert str(os.getpid()) not in processes
    assert len(processes) < 8
    assert "gt_secret" not in output_of("env")


@needs_namespaces
def test_libraries_of_wheels_outside_the_prefix_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "lib" / "python3" / "site-packages"
    packages.mkdir(parents=True)
    library = tmp_path / "lib" / "libdnnl.so.3"
    library.write_text("of a wheel")
    (tmp_path / "secret").write_text("of the user")
    monkeypatch.syspath_prepend(packages)

    assert output_of(f"cat {library}") == "of a wheel"
    assert "of the user" not in output_of(f"cat {tmp_path / 'secret'}; true")


@needs_namespaces
@pytest.mark.parametrize("own", enter.OWN)
def test_a_program_that_lies_in_a_folder_of_all_hides_nothing_below_it(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python puts the folder of a script on its path."""
    with TemporaryDirectory(dir=own) as folder:
        packages = Path(folder) / "site-packages"
        packages.mkdir()
        (packages / "a_package.py").write_text("of a wheel")
        secret = Path(folder) / "secret"
        secret.write_text("of the user")
        monkeypatch.syspath_prepend(packages)
        monkeypatch.syspath_prepend(own)

        assert output_of(f"cat {packages}/*") == "of a wheel"
        assert "of the user" not in output_of(f"cat {secret}; true")


@needs_namespaces
@pytest.mark.parametrize("folder", ["/usr", "/etc", "/sys", "/proc/sys/kernel", "$HOME_HERE"])
def test_a_compiler_writes_nowhere_but_in_its_folder(folder: str, tmp_path: Path) -> None:
    where = folder.replace("$HOME_HERE", str(tmp_path))

    told = output_of(f"echo x > {where}/planted || true; echo y > here; cat here")

    assert told.splitlines()[-1] == "y"
    assert not Path(where, "planted").exists()


@pytest.mark.proof
def test_a_file_without_end_and_processes_without_end_are_ended() -> None:
    endless = output_of("head -c 2G /dev/zero > large || true; ls -s large | cut -d' ' -f1")

    assert int(endless.split()[-1]) <= 1 << 20


@pytest.mark.parametrize(
    "left",
    [
        *("ln -s {key}", "mkfifo", "ln -s /dev/zero", "mkdir", "truncate -s 65M", ": "),
        *("touch", "echo text >"),
    ],
)
def test_what_is_left_in_place_of_a_library_is_not_read(left: str, tmp_path: Path) -> None:
    """What reads it is outside of the sandbox, and would put a key into a kernel."""
    key = tmp_path / "key.pem"
    key.write_text("of the user")
    script = f"{left.format(key=key)} kernel.so"
    command = ("/bin/sh", "-c", script, "sh")
    compiler = Toolchain(name="gcc", version=script, command=command)

    with pytest.raises(CompilationFailed, match="left no library"):
        compile_kernel(Source(text=script), isa=frozenset(), toolchain=compiler)


def test_what_a_compiler_says_without_end_is_cut_off() -> None:
    script = "head -c 64M /dev/zero >&2; echo the end >&2; exit 1"
    compiler = Toolchain(name="gcc", version="endless", command=("/bin/sh", "-c", script, "sh"))
    tracemalloc.start()
    try:
        with pytest.raises(CompilationFailed, match="the end"):
            compile_kernel(Source(text=script), isa=frozenset(), toolchain=compiler)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_what_a_compiler_says_may_be_no_text() -> None:
    script = "printf 'no \\377 text' >&2; exit 1"
    compiler = Toolchain(name="gcc", version="bytes", command=("/bin/sh", "-c", script, "sh"))

    with pytest.raises(CompilationFailed, match="no � text"):
        compile_kernel(Source(text=script), isa=frozenset(), toolchain=compiler)


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMM_TUNER_SANDBOX", "yes")

    with pytest.raises(InvalidSetting, match="auto, require, off"):
        confine.look_at_sandbox()
