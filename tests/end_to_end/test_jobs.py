"""Jobs by the command line."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from gemm_tuner.cli.main import ANSWER_IS_NO, SOMETHING_IS_MISSING, WRONG_USAGE, run
from gemm_tuner.domain.job import JobProgress, JobState
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.jobs.jobs import Jobs
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.sql.tables import jobs

SUBMIT = ["jobs", "submit", "8", "32", "16", "--epilogue", "bias+relu"]


@pytest.fixture(autouse=True)
def database_url(store_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GEMM_TUNER_DB", store_url)
    return store_url


def submitted(capsys: pytest.CaptureFixture[str], *more: str) -> Any:  # noqa: ANN401 - JSON
    assert run([*SUBMIT, *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def shown(job_id: str, capsys: pytest.CaptureFixture[str]) -> Any:  # noqa: ANN401 - JSON
    assert run(["jobs", "show", job_id, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_job_is_asked_for_shown_and_cancelled(capsys: pytest.CaptureFixture[str]) -> None:
    asked = submitted(capsys, "--budget", "5s", "--priority", "3", "--threads", "2")

    assert asked.pop("is_new")
    assert (asked["problem"], asked["state"]) == ("f32 8x32x16 nk bias+relu", "waiting")
    assert (asked["budget_s"], asked["priority"], asked["threads"]) == (5.0, 3, 2)
    assert (asked["class_key"], asked["owner"]) == (detect_cpu().class_key, f"uid {os.getuid()}")
    assert shown(asked["id"][:8], capsys) == asked
    assert run(["jobs", "cancel", asked["id"]]) == 0
    assert f"Job {asked['id']} is cancelled." in capsys.readouterr().out
    assert run(["jobs", "cancel", asked["id"][:4]]) == ANSWER_IS_NO
    assert "is over: cancelled" in capsys.readouterr().out
    assert run(["jobs", "list", "--state", "waiting"]) == 0
    assert "0 jobs" in capsys.readouterr().out


def test_what_is_asked_twice_is_one_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SUBMIT) == 0
    said = capsys.readouterr()
    assert run(SUBMIT) == 0

    assert said.out.endswith("bias+relu, new\n")
    assert 'No worker for such CPUs runs now; start one: "gemm-tuner worker".' in said.err
    assert capsys.readouterr().out == said.out.replace("new", "asked for before")


def test_progress_and_what_came_out_are_printed(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = submitted(capsys)
    store, now = Jobs(open_database(database_url)), datetime.now(UTC)
    store.see_worker("w", class_key=asked["class_key"], cpu_key="k", now=now)
    assert store.claim("w", class_keys=[asked["class_key"]], now=now, lease_s=60)
    done = JobProgress(tried=9, failed=1, best_ns=1240.0, over_baseline=1.25, seconds_left=12.0)
    store.report(asked["id"], "w", done, now, 60)

    assert run(["jobs", "show", asked["id"]]) == 0
    assert "running, 9 tried, 1 failed, best 1.24 µs, 1.25 x baseline, 12 s left" in (
        capsys.readouterr().out
    )
    assert run(["jobs", "cancel", asked["id"]]) == 0
    assert "ends in some seconds, with the best so far" in capsys.readouterr().out
    store.finish(asked["id"], "w", JobState.DONE, "tuned: 1.25 times onednn 3.2.0", now)
    assert run(["jobs", "list"]) == 0
    assert "tuned: 1.25 times onednn 3.2.0" in capsys.readouterr().out
    assert run(SUBMIT) == 0
    assert "No worker" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["jobs", "show", "0" * 32], ANSWER_IS_NO),
        (["jobs", "cancel", "0000"], ANSWER_IS_NO),
        (["jobs", "show", "%"], WRONG_USAGE),
        (["jobs", "show", "\udcff"], WRONG_USAGE),
        (["jobs", "list", "--state", "lost"], WRONG_USAGE),
        ([*SUBMIT, "--priority", "101"], WRONG_USAGE),
        ([*SUBMIT, "--budget", "2h"], WRONG_USAGE),
        ([*SUBMIT, "--regime", "both"], WRONG_USAGE),
        (["jobs", "submit", "0", "32", "16"], WRONG_USAGE),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    command: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(capsys)

    assert run(command) == code

    said = capsys.readouterr()
    assert (said.out + said.err).count("\n") == 1


def test_a_list_says_which_job_is_damaged(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, other = submitted(capsys)["id"], submitted(capsys, "--threads", "2")["id"]
    with open_database(database_url).begin() as connection:
        connection.execute(update(jobs).where(jobs.c.id == damaged).values(problem="f32 1x1x1"))

    assert run(["jobs", "list", "--json"]) == 0

    told = capsys.readouterr()
    assert [job["id"] for job in json.loads(told.out)] == [other]
    assert f"Job {damaged} is left out: the problem" in told.err.replace("\n", " ")


def test_a_list_makes_no_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEMM_TUNER_DB", f"sqlite:///{tmp_path}/none.sqlite3")

    assert run(["jobs", "list"]) == SOMETHING_IS_MISSING
    assert "there is no database" in capsys.readouterr().err
