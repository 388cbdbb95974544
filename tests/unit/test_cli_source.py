"""Why `gemm-tuner source` has no kernel to show."""

import pytest
from samples import CONTEXT, CPU, PROBLEM, make_disturbed_trial, make_trial, make_trial_beside_mkl

from gemm_tuner.cli.source import _why_not
from gemm_tuner.derive import derive_verdict
from gemm_tuner.domain.record import Trial


@pytest.mark.parametrize(
    ("trials", "reason"),
    [
        ([], "none was tuned"),
        ([make_trial(call_ns=1100)], "a kernel is served from 1.000 times on"),
        (
            [make_trial_beside_mkl(call_ns=1500)],
            "0.91 times as fast as onednn 3.2.0, which would run instead, so onednn 3.2.0 is to ",
        ),
        ([make_disturbed_trial()], "its measurement decides nothing, disturbed"),
        ([make_trial()], "its binary is not in the store any more"),
    ],
)
def test_each_reason_to_have_no_kernel_has_its_words(trials: list[Trial], reason: str) -> None:
    verdict = derive_verdict(
        trials, problem=PROBLEM, cpu_key=CPU.exact_key, context=CONTEXT, complete=True
    )

    assert reason in _why_not(verdict)
