"""A command that measures waits for a worker that does, and a worker for it."""

import time

import pytest

from gemm_tuner.cli.terminal.measuring import measuring
from gemm_tuner.errors import PreparationStopped
from gemm_tuner.machine.measuring_lock import MeasuringLock


def test_others_do_not_measure_meanwhile(capsys: pytest.CaptureFixture[str]) -> None:
    other = MeasuringLock()

    with measuring():
        assert not other.acquire()

    assert other.acquire()
    other.release()
    assert not capsys.readouterr().err


def test_it_waits_for_one_that_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = MeasuringLock()
    assert other.acquire()
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            other.release()

    monkeypatch.setattr(time, "sleep", sleep)

    who = "another thread of this program"
    with measuring():
        assert not other.acquire()

    assert len(pauses) == 3
    assert capsys.readouterr().err.count(f"Waiting for {who}, which measures.") == 1


def test_whoever_stops_the_command_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    other = MeasuringLock()
    assert other.acquire()
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)

    with (
        pytest.raises(PreparationStopped, match="while it was waiting for another thread"),
        measuring(lambda: len(pauses) == 2),
    ):
        raise AssertionError("it measures beside the other")

    assert len(pauses) == 2
    assert not MeasuringLock().acquire(), "the other goes on"
    other.release()
