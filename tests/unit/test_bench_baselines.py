import ctypes
from pathlib import Path

import pytest

from gemm_tuner.bench.baselines.baseline import Baseline
from gemm_tuner.bench.baselines.choose import choose_baseline
from gemm_tuner.bench.baselines.onednn import load_onednn
from gemm_tuner.bench.workload import Callee, Workload
from gemm_tuner.errors import BaselineMissing


class Library:
    """A baseline that does nothing."""

    fuses_epilogue = True

    def __init__(self, text: str) -> None:
        self.text = text

    def prepare(self, workload: Workload) -> Callee:
        """Not called."""
        raise NotImplementedError


def _missing() -> Baseline:
    raise BaselineMissing("libgomp.so.1: cannot open shared object file")


MAKERS = {"first": _missing, "second": lambda: Library("second 2"), "third": lambda: Library("3")}


def test_choice_says_why_others_were_skipped() -> None:
    found = choose_baseline(
        "auto", MAKERS, lambda baseline: "y is wrong" if baseline.text == "second 2" else 0.25
    )

    assert found.baseline.text == "3"
    assert found.call_s == 0.25
    assert found.note == (
        "first was skipped: libgomp.so.1: cannot open shared object file "
        "second was skipped: second 2: y is wrong."
    )


def test_first_choice_has_no_note() -> None:
    found = choose_baseline("second", MAKERS, lambda _baseline: 0.5)

    assert found.note == ""


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("libgomp.so.1: cannot open shared object file", "libgomp1 on Debian, libgomp on RHEL"),
        ("file too short", "pip install --force-reinstall"),
    ],
)
def test_advice_fits_what_did_not_load(
    monkeypatch: pytest.MonkeyPatch, reason: str, advice: str
) -> None:
    def refuse(*_path: str, **_mode: int) -> None:
        raise OSError(reason)

    monkeypatch.setattr(ctypes, "CDLL", refuse)

    with pytest.raises(BaselineMissing, match=reason) as refusal:
        load_onednn(Path("libdnnl.so.3"), Path("driver.so"))

    assert advice in str(refusal.value)
