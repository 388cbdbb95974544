"""The extension module is built where a compiler is, and its absence is no error."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.errors import ToolchainMissing

SCRIPT = Path(__file__).parents[2] / "hatch_build.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_library_is_built(script: ModuleType, tmp_path: Path) -> None:
    try:
        find_toolchain("gcc")
    except ToolchainMissing as missing:
        pytest.skip(str(missing))
    target = tmp_path / "_native.abi3.so"

    try:
        script.build_native(SCRIPT.parent, target)
    except script.NotBuilt as reason:
        if "Python.h" in str(reason):
            pytest.skip(str(reason))
        raise

    assert b"PyInit__native" in target.read_bytes()


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
