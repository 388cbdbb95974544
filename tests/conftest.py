"""Skip, with the reason, what this machine cannot run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gemm_tuner.bench.baselines.onednn import find_onednn
from gemm_tuner.bench.baselines.openblas import find_openblas
from gemm_tuner.domain.cpu import isa_text, parse_isa
from gemm_tuner.errors import BaselineMissing
from gemm_tuner.runtime.detect import detect_cpu

_FINDERS: dict[str, Callable[[], Path]] = {"onednn": find_onednn, "openblas": find_openblas}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need CPU features or a baseline library that are not here."""
    for marker in item.iter_markers("isa"):
        missing = parse_isa(marker.args) - detect_cpu().isa
        if missing:
            pytest.skip(f"needs {isa_text(missing)}, which is not usable here")
    for marker in item.iter_markers("baseline"):
        try:
            _FINDERS[marker.args[0]]()
        except BaselineMissing as error:
            pytest.skip(str(error))
