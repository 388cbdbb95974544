import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import cast

import pytest
from samples import CONTEXT, CPU, PROBLEM, make_artifact, make_trial

from gemm_tuner.client.agreement import check_kernel, check_verdict
from gemm_tuner.derive import derive_verdict
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import KernelRejected
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.trust.payload import VerdictPayload

TRIAL = make_trial()
NOW = datetime(2026, 11, 20, tzinfo=UTC)
VERDICT = VerdictPayload.of(
    derive_verdict([TRIAL], problem=PROBLEM, cpu_key=CPU.exact_key, context=CONTEXT, complete=True),
    issued_at=NOW,
    expires_at=NOW + timedelta(days=1),
    serial=1,
)


def kernel_that_says(**changes: object) -> Kernel:
    description = {
        "problem": PROBLEM.text,
        "candidate": TRIAL.candidate.text,
        "abi_version": make_artifact().abi_version,
        "required_isa": ["avx512f"],
        **changes,
    }
    stand_in = SimpleNamespace(
        native=SimpleNamespace(describe=lambda: json.dumps(description)),
        artifact=make_artifact(),
        problem=Problem.parse(str(description["problem"])),
        candidate=TRIAL.candidate,
    )
    return cast("Kernel", stand_in)


@pytest.mark.parametrize("made_for", [PROBLEM.text, "f32 1..128x3072x768 nk bias+gelu_erf"])
def test_a_kernel_for_the_problem_or_a_range_that_holds_it_agrees(made_for: str) -> None:
    check_kernel(kernel_that_says(problem=made_for), VERDICT, PROBLEM)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"problem": "f32 1..127x3072x768 nk bias+gelu_erf"}, "problem"),
        ({"problem": "f32 128x3072x768 nk bias"}, "problem"),
        ({"problem": "f32 128x3072x769 nk bias+gelu_erf"}, "problem"),
        ({"abi_version": 1}, "abi_version"),
        ({"required_isa": ["avx512f", "amx_tile"]}, "required_isa"),
        ({"required_isa": []}, "required_isa"),
    ],
)
def test_a_kernel_that_says_something_else_is_not_called(
    changes: dict[str, object], name: str
) -> None:
    with pytest.raises(KernelRejected, match=f"its {name} is"):
        check_kernel(kernel_that_says(**changes), VERDICT, PROBLEM)


def test_a_verdict_that_answers_the_question_agrees() -> None:
    check_verdict(VERDICT, problem=PROBLEM, cpu_key=CPU.exact_key, context=CONTEXT)
