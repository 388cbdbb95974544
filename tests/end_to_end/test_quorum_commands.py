"""A quorum as its users meet it: the option, `explain`, and the client."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from served import PROBLEM, Site, keep_trial

from gemm_tuner import Client
from gemm_tuner.build.compile import Build
from gemm_tuner.cli.main import ANSWER_IS_NO, WRONG_USAGE, run
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.trust.attestation import MeasuringKeys

SIZES = ["8", "32", "16", "--epilogue", "bias+relu"]


@pytest.fixture
def other(site: Site, tmp_path: Path) -> Iterator[Repository]:
    """Yield the store of the site as another host writes it, whose key is believed here."""
    keys = MeasuringKeys(tmp_path / "other")
    MeasuringKeys().accept(keys.own_made())
    engine = open_database(site.settings.database_url)
    yield Repository(engine, keys)
    engine.dispose()


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0", "greater than or equal to 1"), ("17", "less than or equal to 16"), ("two", "integer")],
)
def test_what_is_no_quorum_is_refused(
    value: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEMM_TUNER_QUORUM", value)

    assert run(["serve"]) == WRONG_USAGE

    told = capsys.readouterr().err
    assert "'--quorum' (env var: 'GEMM_TUNER_QUORUM')" in told
    assert expected in told


def test_explain_shows_how_many_hosts_found_it_and_that_they_disagree(
    site: Site, other: Repository, build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    site.repository.require_quorum(2)
    command = ["explain", *SIZES, "--db", site.settings.database_url]
    assert run(command) in {0, ANSWER_IS_NO}
    assert "tuned on 1 of 2 hosts that the quorum asks for" in capsys.readouterr().out

    keep_trial(other, build, cpu=detect_cpu(), speed=2)
    run(command)

    told = capsys.readouterr().out
    assert "tuned: 2.000 times" in told
    assert "the 2 hosts disagree" in told
    assert "10.000 times" in told


def test_a_client_is_given_a_kernel_when_the_second_host_finds_it(
    site: Site, other: Repository, build: Build, tmp_path: Path
) -> None:
    settings = replace(site.settings, quorum=2)
    with replace(site, settings=settings).serving() as url:
        before = Client(url, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        keep_trial(other, build, cpu=detect_cpu(), speed=10)
        after = Client(url, cache_dir=tmp_path / "other-cache").kernel(PROBLEM)

    assert isinstance(before, FallbackKernel)
    assert "too few hosts found it" in before.reason
    assert isinstance(after, Kernel)
