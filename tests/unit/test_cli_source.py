"""Why `gemm-tuner source` has no kernel to show."""

import pytest
from samples import CONTEXT, CPU, PROBLEM, make_disturbed_trial, make_trial

from gemm_tuner.cli.source import _why_not
from gemm_tuner.domain.record import Trial
from gemm_tuner.select.derive import derive_verdict


@pytest.mark.parametrize(
    ("trials", "reason"),
    [
        ([], "none was tuned"),
        ([make_trial(call_ns=1100)], "a kernel is served from 1.000 times on"),
        ([make_disturbed_trial()], "its measurement decides nothing, disturbed"),
        ([make_trial()], "its binary is not in the store any more"),
    ],
)
def test_each_reason_to_have_no_kernel_has_its_words(trials: list[Trial], reason: str) -> None:
    verdict = derive_verdict(
        trials, problem=PROBLEM, cpu_key=CPU.exact_key, context=CONTEXT, complete=True
    )

    assert reason in _why_not(verdict)
