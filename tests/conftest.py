"""Leave out, with the reason, what this machine cannot run, and tell the two stages apart."""

import gc
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import cache
from inspect import isfunction
from pathlib import Path

import pytest

from gemm_tuner.bench.baselines.libxsmm import Libxsmm
from gemm_tuner.bench.baselines.mkl import find_mkl
from gemm_tuner.bench.baselines.onnx_runtime import OnnxRuntime
from gemm_tuner.bench.baselines.openvino import OpenVino
from gemm_tuner.bench.baselines.torch_eager import TorchEager
from gemm_tuner.bench.baselines.torch_inductor import TorchInductor
from gemm_tuner.bench.baselines.torch_onednn import TorchOneDnn
from gemm_tuner.bench.baselines.torch_weights import TorchWeightOnly
from gemm_tuner.bench.baselines.zentorch import Zentorch
from gemm_tuner.bench.drivers import build_drivers
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.cpu import isa_text, parse_isa
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.libraries.onednn import find_onednn
from gemm_tuner.libraries.openblas import find_openblas
from gemm_tuner.machine.detect import detect_cpu

pytest_plugins = ("databases", "long_first", "shared_collection")


def _find_libxsmm() -> object:
    drivers = build_drivers(find_toolchain(), detect_cpu(), baselines=("libxsmm",))
    return Libxsmm(drivers.libxsmm)


_FINDERS: dict[str, Callable[[], object]] = {
    "onednn": find_onednn,
    "openblas": find_openblas,
    "mkl": find_mkl,
    "libxsmm": _find_libxsmm,
    "onnxruntime": OnnxRuntime,
    "torch": TorchEager,
    "torch-weights": TorchWeightOnly,
    "torch-inductor": TorchInductor,
    "torch-onednn": TorchOneDnn,
    "zentorch": Zentorch,
    "openvino": OpenVino,
}
# What the extra `all` installs, or NumPy has: the other libraries come with the second stage.
_ALWAYS_INSTALLED = frozenset({"onednn", "openblas"})
_TESTS = Path(__file__).parent
_SUMMARY_COLUMNS = 240
# Proofs without exception, whose collection alone takes seconds in each process: it makes up
# requests, and loads PyTorch.
_SLOW_TO_COLLECT = tuple(_TESTS / name for name in ("service/test_schema.py", "pytorch"))


def pytest_configure() -> None:
    """Take SIGINT as in the foreground: what a shell starts in the background ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out of the quick stage what it would only collect."""
    return True if _is_quick(config) and collection_path in _SLOW_TO_COLLECT else None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Make no items in the quick stage of functions that are proofs with all parameters."""
    if not isfunction(obj) or not _is_quick(collector.config):
        return None
    markers = (*getattr(obj, "pytestmark", ()), *collector.iter_markers())
    return [] if any(map(_is_of_proofs, markers)) else None


def _is_quick(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "not proof")


def _is_of_proofs(marker: pytest.Mark) -> bool:
    """Return whether what has a marker is left to the stage that installs everything."""
    is_optional = marker.name == "baseline" and marker.args[0] not in _ALWAYS_INSTALLED
    return is_optional or marker.name == "proof"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected, nor later among what was collected."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests of optional libraries to the stage that installs them."""
    for item in items:
        is_slow = any(map(item.path.is_relative_to, _SLOW_TO_COLLECT))
        if is_slow or any(map(_is_of_proofs, item.iter_markers("baseline"))):
            item.add_marker(pytest.mark.proof)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need CPU features or a baseline library that are not here."""
    for marker in item.iter_markers("isa"):
        missing = parse_isa(marker.args) - detect_cpu().isa
        if missing:
            pytest.skip(f"this CPU lacks {isa_text(missing).replace(',', ', ')}")
    for marker in item.iter_markers("baseline"):
        reason = _why_missing(marker.args[0])
        if reason is not None:
            pytest.skip(reason)


@cache
def _why_missing(baseline: str) -> str | None:
    """Return why a baseline cannot be used here, None if it can."""
    try:
        _FINDERS[baseline]()
    except BaselineMissing as error:
        return str(error)
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Sum up what was skipped, one line for each reason, and say how each failure begins."""
    # Where the output is no terminal, 80 columns would have the name of the test alone.
    writer = terminalreporter._tw
    writer.fullwidth = max(writer.fullwidth, _SUMMARY_COLUMNS)
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[told.removeprefix("Skipped: ").partition("\n")[0]] += 1
    if reasons:
        terminalreporter.section("skipped")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(scope="session", autouse=True)
def data_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep measuring keys, and all else of a user, out of the user's own data directory."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder))
        yield folder
