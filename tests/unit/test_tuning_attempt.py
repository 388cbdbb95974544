"""What an attempt records."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import cast

from samples import CPU, PROBLEM, make_trial

from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.source import Source
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.attempt import Attempts

NOON = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)


def test_a_trial_has_the_time_of_the_clock(repository: Repository) -> None:
    candidate = make_trial().candidate
    attempts = Attempts(
        problem=PROBLEM,
        cpu=CPU,
        host=cast("TrialHost", SimpleNamespace(provers=1)),  # asked for nothing that fails to build
        repository=repository,
        toolchain=find_toolchain(),
        render=lambda _problem, _candidate, _family: Source(text="this is no C++"),
        clock=lambda: NOON,
    )

    assert attempts.prove([candidate], ExecutionContext()) == []

    [kept] = repository.trials()
    assert kept.outcome is Outcome.COMPILE_FAILED
    assert kept.created_at == NOON
