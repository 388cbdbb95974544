"""The extension module is built where a compiler is, and its absence is no error."""

import importlib.util
import logging
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.epilogue import Epilogue
from gemm_tuner.errors import ToolchainMissing
from gemm_tuner.libraries import finish
from gemm_tuner.resources import (
    call_native_sources,
    digest_of_sources,
    library_native_sources,
)
from gemm_tuner.runtime import direct

SCRIPT = Path(__file__).parents[2] / "hatch_build.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _ask_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the script take the compiler of C beside one of C++, or skip the test."""
    try:
        compiler = find_toolchain(name).command[0]
    except ToolchainMissing as missing:
        pytest.skip(str(missing))
    of_c = compiler.replace("g++", "gcc" if name == "gcc" else "g")
    monkeypatch.setenv("CC", f"{compiler} cc" if name == "zig" else of_c)


@pytest.mark.parametrize(
    "name", ["gcc", *(pytest.param(one, marks=pytest.mark.proof) for one in ("clang", "zig"))]
)
def test_each_compiler_builds_the_library(
    name: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ask_for(name, monkeypatch)
    target = tmp_path / "_native.abi3.so"

    try:
        script.build_native(SCRIPT.parent, target)
    except script.NotBuilt as reason:
        if "has no Python.h" in str(reason):
            pytest.skip(str(reason))
        raise

    assert b"PyInit__native" in target.read_bytes()


@pytest.mark.proof
@pytest.mark.parametrize("name", ["clang", "zig"])
def test_each_other_compiler_builds_the_pass(
    name: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first found, which is gcc where it is installed, has built what other tests call."""
    _ask_for(name, monkeypatch)
    target = tmp_path / "_finish.so"

    script.build_finish(SCRIPT.parent, target)

    y, x = np.empty((3, 40), np.float32), np.linspace(-9, 9, 120, dtype=np.float32).reshape(3, 40)
    operations = finish.operations_of(Epilogue.parse("tanh").steps, [])
    finish.Finish(operations, x, y).run(finish.load_finish(target))
    np.testing.assert_allclose(y, np.tanh(x), rtol=1e-5)


def test_what_was_built_of_the_same_sources_is_left_as_it_is(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An install takes 18 s of processor time more where it builds what is there."""
    monkeypatch.delenv("CC", raising=False)
    built: list[str] = []
    sealed = script.sealed
    for name in ("native", "finish"):
        monkeypatch.setattr(
            script, f"build_{name}", lambda _root, target: built.append(target.name)
        )
    for name, sources in (("TARGET", call_native_sources), ("FINISH", library_native_sources)):
        library = tmp_path / name
        library.write_bytes(sealed(b"code", digest_of_sources(sources())))
        monkeypatch.setattr(script, name, library)
    hook = SimpleNamespace(root=SCRIPT.parent)

    def built_by_installing() -> list[str]:
        built.clear()
        data: dict[str, list[str]] = {"artifacts": []}
        script.NativeHook.initialize(hook, "editable", data)
        assert len(data["artifacts"]) == 2
        return sorted(built)

    assert built_by_installing() == []
    whole = (tmp_path / "TARGET").read_bytes()
    for other in (
        sealed(b"code", "of other sources"),
        whole[:-1],
        b"edoc" + whole[4:],
        f"code {digest_of_sources(call_native_sources())}".encode(),
        b"",
    ):
        (tmp_path / "TARGET").write_bytes(other)
        assert built_by_installing() == ["TARGET"], other
    (tmp_path / "TARGET").write_bytes(whole)
    assert built_by_installing() == []
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("platform.machine", lambda: "aarch64")
        assert built_by_installing() == ["FINISH", "TARGET"]
    with monkeypatch.context() as changed:
        newer = tmp_path / "newer_script.py"
        newer.write_text("_FLAGS = ()")
        changed.setattr(script, "__file__", str(newer))
        assert built_by_installing() == ["FINISH", "TARGET"]
    monkeypatch.setenv("CC", "clang")
    assert built_by_installing() == ["FINISH", "TARGET"]


def test_what_was_built_is_known_and_was_never_there_in_part(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that is interrupted would leave a library that no install replaces."""
    target = tmp_path / "_finish.so"
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f"#!/bin/sh\n[ -e {target} ] && exit 1\n"
        'while [ "$1" != -o ]; do shift; done; echo code > "$2"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))

    script.build_finish(SCRIPT.parent, target)

    assert target.read_bytes().startswith(b"code\n")
    assert script.is_current(SCRIPT.parent, "library", target)
    assert {one.name for one in tmp_path.iterdir()} == {"_finish.so", "compiler"}


def test_old_library_goes_where_none_can_be_built(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    target = tmp_path / "_native.abi3.so"
    target.write_text("of an older version")

    with pytest.raises(script.NotBuilt, match=r"is on PATH|Python\.h"):
        script.build_native(SCRIPT.parent, target)

    assert not target.exists()


def test_what_the_compiler_refuses_is_told(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "false")

    with pytest.raises(script.NotBuilt, match=r"false .* failed|Python\.h"):
        script.build_native(SCRIPT.parent, tmp_path / "_native.abi3.so")


@pytest.fixture(scope="module")
def target(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the pass in C of this checkout; to build it takes seconds."""
    if finish.built_finish() is not None:
        return finish._BUILT
    target = tmp_path_factory.mktemp("built") / "_finish.so"
    try:
        script.build_finish(SCRIPT.parent, target)
    except script.NotBuilt as reason:
        pytest.skip(str(reason))
    return target


@pytest.fixture
def built(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the built pass be that of a copy of its sources, and return the copy of the pass."""
    sources = tuple(Path(shutil.copy(one, tmp_path)) for one in library_native_sources())
    monkeypatch.setattr(finish, "_BUILT", target)
    monkeypatch.setattr(finish, "library_native_sources", lambda: sources)
    return tmp_path / "finish.c"


@pytest.mark.proof
@pytest.mark.usefixtures("built")
def test_a_pass_built_from_its_source_is_used(caplog: pytest.LogCaptureFixture) -> None:
    assert finish.built_finish.__wrapped__() is not None
    assert not caplog.records


def test_a_pass_older_than_its_source_is_not_used(
    built: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built.write_text(built.read_text().replace("GELU_TANH, GELU_ERF", "GELU_ERF, GELU_TANH"))

    with caplog.at_level(logging.WARNING):
        assert finish.built_finish.__wrapped__() is None

    assert "python hatch_build.py" in caplog.text


@pytest.mark.skipif(direct.NATIVE is None, reason="_native is not built; run hatch_build.py")
def test_a_call_path_older_than_its_sources_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    newer = tmp_path / "module.c"
    newer.write_text("int newer;")
    monkeypatch.setattr(direct, "call_native_sources", lambda: (newer,))

    with caplog.at_level(logging.WARNING):
        assert direct._load() is None  # the module was loaded with this one

    assert "python hatch_build.py" in caplog.text
