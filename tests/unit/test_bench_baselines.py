import ctypes
from pathlib import Path

import pytest

from gemm_tuner.bench.baselines.baseline import Baseline
from gemm_tuner.bench.baselines.choose import choose_baselines
from gemm_tuner.bench.baselines.onednn import load_onednn
from gemm_tuner.bench.workload import Runner, Workload
from gemm_tuner.errors import BaselineMissing, TrialFailed


class Library:
    """A baseline that does nothing."""

    fuses_epilogue = True
    most_weight_copies = None
    is_of_openmp = False
    preparation_s = 0.0

    def __init__(self, text: str) -> None:
        self.text = text

    def prepare(self, workload: Workload) -> Runner:
        """Not called."""
        raise NotImplementedError


def _missing() -> Baseline:
    raise BaselineMissing("libgomp.so.1: cannot open shared object file")


MAKERS = {
    "onednn": _missing,
    "openblas": lambda: Library("openblas 2"),
    "scalar": lambda: Library("3"),
}


def _check(baseline: Baseline) -> float | str:
    return "y is wrong" if baseline.text == "openblas 2" else 0.25


def test_choice_says_why_others_were_left_out() -> None:
    choice = choose_baselines(["auto"], MAKERS, _check)

    assert [found.baseline.text for found in choice.baselines] == ["3"]
    assert choice.baselines[0].call_s == 0.25
    assert choice.left_out == {
        "onednn": "libgomp.so.1: cannot open shared object file",
        "openblas": "openblas 2: y is wrong.",
    }


def test_automatic_choice_ends_with_the_first_that_can_be_used() -> None:
    choice = choose_baselines(["auto"], MAKERS, lambda _baseline: 0.5)

    assert [found.name for found in choice.baselines] == ["openblas"]


def test_all_that_are_named_and_usable_are_chosen() -> None:
    choice = choose_baselines(["onednn", "openblas", "scalar"], MAKERS, lambda _baseline: 0.5)

    assert [found.name for found in choice.baselines] == ["openblas", "scalar"]
    assert list(choice.left_out) == ["onednn"]


def test_baseline_whose_check_breaks_is_left_out() -> None:
    def check(baseline: Baseline) -> float | str:
        if baseline.text == "openblas 2":
            raise TrialFailed("the trial broke.")
        return 0.5

    choice = choose_baselines(["openblas", "scalar"], MAKERS, check)

    assert [found.name for found in choice.baselines] == ["scalar"]
    assert choice.left_out == {"openblas": "the trial broke."}


def test_nothing_usable_is_an_error_with_each_reason() -> None:
    with pytest.raises(BaselineMissing, match=r"libgomp.* y is wrong"):
        choose_baselines(["onednn", "openblas"], MAKERS, _check)


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
