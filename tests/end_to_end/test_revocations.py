"""Revoked kernels: nobody loads one, from wherever and whatever the answer says."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from time import monotonic

import httpx
import pytest
from served import CANDIDATE, PROBLEM, Edit, Site, keep_trial
from sqlalchemy import text

from gemm_tuner import Client
from gemm_tuner.build.compile import Build
from gemm_tuner.cli.main import ANSWER_IS_NO, WRONG_USAGE, run
from gemm_tuner.client import revocations
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.domain.revocation import MAX_REVOCATIONS, Revocations
from gemm_tuner.errors import SignatureInvalid
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.trust.revocations import open_revocations, sign_revocations

NOW = datetime.now(UTC)


@pytest.fixture
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients ask for revocations each time."""
    monkeypatch.setattr(revocations, "ASK_EVERY_S", 0.0)


@pytest.fixture
def turn_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    """Return how to turn the clock of clients."""

    def turn(by: timedelta) -> None:
        class Turned(datetime):
            @classmethod
            def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
                assert tz is UTC
                return datetime.now(UTC) + by

        monkeypatch.setattr(revocations, "datetime", Turned)

    return turn


def revoke(site: Site, build: Build, *options: str) -> None:
    arguments = ["revoke", build.artifact.sha256, "--reason", "it is wrong", *options]
    assert run([*arguments, "--db", site.settings.database_url]) == 0


def build_wrong(trial: Trial) -> Trial:
    """Return the trial in which the kernel of another gave a wrong result."""
    return replace(
        trial,
        outcome=Outcome.WRONG,
        stage=Stage.RACE,
        measurement=None,
        conditions=None,
        created_at=trial.created_at + timedelta(seconds=1),
    )


def only(path_of_edit: str, edit: Callable[[bytes], bytes | None]) -> Edit:
    """Return someone in the middle who changes the answers of one path."""
    return lambda path, body: edit(body) if path == path_of_edit else body


@pytest.mark.usefixtures("always_due")
def test_a_revoked_kernel_is_not_served_until_that_is_lifted(
    site: Site, build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    revoke(site, build)
    with site.serving() as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        explain = Client(address, cache_dir=tmp_path / "cache").resolve(PROBLEM).explain
        bytes_of_it = httpx.get(
            f"{address}/v1/artifacts/sha256/{build.artifact.sha256}", trust_env=False
        )
        revoke(site, build, "--lift")
        lifted = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert any("it is revoked: it is wrong" in step for step in explain)
    assert bytes_of_it.status_code == 404
    assert isinstance(lifted, Kernel)
    assert "no longer revoked" in capsys.readouterr().out


@pytest.mark.usefixtures("always_due")
def test_a_kernel_in_memory_that_is_revoked_is_not_given_out_again(
    site: Site, build: Build, tmp_path: Path
) -> None:
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        before = client.kernel(PROBLEM)
        assert client.kernel(PROBLEM) is before

        revoke(site, build)
        after = client.kernel(PROBLEM)

    assert isinstance(before, Kernel)
    assert isinstance(after, FallbackKernel)


def test_an_old_answer_does_not_bring_back_a_revoked_kernel(
    site: Site, build: Build, tmp_path: Path
) -> None:
    kept: list[bytes] = []

    def keep(path: str, body: bytes) -> bytes:
        if path == "/v1/resolve":
            kept.append(body)
        return body

    with site.serving(keep) as address:
        Client(address, cache_dir=tmp_path / "other").kernel(PROBLEM)
    revoke(site, build)
    # The thief replays the answer, and hands out the artifact.
    replay = only("/v1/resolve", lambda _body: kept[0])
    with site.serving(replay, port=int(address.rpartition(":")[2])) as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert f"kernel {build.artifact.sha256[:12]} was revoked" in kernel.reason


@pytest.mark.usefixtures("always_due")
def test_a_revoked_kernel_is_not_taken_from_the_cache(
    site: Site, build: Build, tmp_path: Path
) -> None:
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        (answer,) = (tmp_path / "cache" / "answers").iterdir()
        before = answer.read_bytes()
        revoke(site, build)
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
    answer.write_bytes(before)

    kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert "does not answer" in kernel.reason
    assert "was revoked" in kernel.reason


@pytest.mark.usefixtures("always_due")
def test_an_older_list_is_refused(
    site: Site, build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lists: list[bytes] = []

    def first_again(path: str, body: bytes) -> bytes:
        if path != "/v1/revocations":
            return body
        lists.append(body)
        return lists[0]

    with site.serving() as address:
        port = int(address.rpartition(":")[2])
        lists.append(httpx.get(f"{address}/v1/revocations", trust_env=False).content)
        revoke(site, build)
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        revoke(site, build, "--lift")  # so that the service names the kernel again
    with site.serving(first_again, port=port) as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert "was revoked (revocations 1)" in kernel.reason
    assert "the revocations 0, older than the 1 kept here" in caplog.text


def _flip(body: bytes) -> bytes:
    document = json.loads(body)
    document["signature"] = document["signature"][::-1]
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "change", [_flip, lambda _body: b"{}", lambda _body: b"\xff", lambda _body: None]
)
def test_a_list_that_cannot_be_believed_changes_nothing(
    change: Callable[[bytes], bytes | None], site: Site, tmp_path: Path
) -> None:
    with site.serving(only("/v1/revocations", change)) as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, Kernel)
    assert not list((tmp_path / "cache" / "revocations").iterdir())


def test_a_revocation_that_another_process_was_given_is_learnt(
    site: Site, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        (kept,) = (tmp_path / "cache" / "revocations").iterdir()
        client = Client(address, cache_dir=tmp_path / "cache")
        assert isinstance(client.kernel(PROBLEM), Kernel)  # it has not asked: the list is new
        revoke(site, build)
        os.utime(kept, (0, 0))
        Client(address, cache_dir=tmp_path / "cache").kernel("f32 1x2x3")  # asks for the list

    monkeypatch.setattr(revocations, "monotonic", lambda: monotonic() + revocations.ASK_EVERY_S)
    kernel = client.kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert "was revoked" in kernel.reason


def test_a_list_that_others_could_have_written_is_none(
    site: Site, build: Build, tmp_path: Path
) -> None:
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        (kept,) = (tmp_path / "cache" / "revocations").iterdir()
        newer = json.loads(kept.read_bytes()) | {"artifacts": [build.artifact.sha256], "number": 9}
        kept.write_text(json.dumps(newer))
        kept.chmod(0o666)
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, Kernel)
    assert json.loads(kept.read_bytes())["number"] == 0


def test_a_list_signed_with_another_key_is_not_believed(
    site: Site, build: Build, tmp_path: Path
) -> None:
    thief = KeyPair.load_or_create(tmp_path / "thief.pem")
    false = Revocations(number=9, artifacts=(build.artifact.sha256,), key_ids=())
    document = sign_revocations(false, thief, issued_at=NOW).model_dump_json().encode()

    with site.serving(only("/v1/revocations", lambda _body: document)) as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, Kernel)


@pytest.mark.usefixtures("always_due")
def test_who_withholds_the_list_gains_a_week_at_most(
    site: Site, tmp_path: Path, turn_clock: Callable[[timedelta], None]
) -> None:
    settings = replace(site.settings, verdict_lifetime=timedelta(days=30))
    site = replace(site, settings=settings)
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        port = int(address.rpartition(":")[2])
    withhold = only("/v1/revocations", lambda _body: None)
    with site.serving(withhold, port=port) as address:
        soon = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        turn_clock(timedelta(days=9))
        late = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(soon, Kernel)
    assert isinstance(late, FallbackKernel)
    assert "withholds newer ones" in late.reason


def test_a_kernel_whose_verdict_expired_while_the_service_is_away_is_not_given_out(
    site: Site, tmp_path: Path, turn_clock: Callable[[timedelta], None]
) -> None:
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        client.kernel(PROBLEM)
    assert isinstance(client.kernel(PROBLEM), Kernel)

    turn_clock(timedelta(days=8))
    in_memory = client.kernel(PROBLEM)
    in_cache = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    for kernel in (in_memory, in_cache):
        assert isinstance(kernel, FallbackKernel)
        assert "does not answer" in kernel.reason
        assert "held until" in kernel.reason


def test_a_clock_that_is_turned_back_revives_nothing(
    site: Site, tmp_path: Path, turn_clock: Callable[[timedelta], None]
) -> None:
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
    (kept,) = (tmp_path / "cache" / "revocations").iterdir()
    newest = json.loads(kept.read_bytes()) | {"issued_at": (NOW + timedelta(days=8)).isoformat()}
    kept.write_text(json.dumps(newest))

    turn_clock(timedelta(days=-300))
    kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert "held until" in kernel.reason


# A list is issued at the start of a day: in the last minutes of one, a day less is no jump.
@pytest.mark.parametrize("days", [-300, -2, 300])
def test_a_clock_that_jumps_while_the_service_answers_gives_no_kernel_and_no_crash(
    days: int, site: Site, tmp_path: Path, turn_clock: Callable[[timedelta], None]
) -> None:
    turn_clock(timedelta(days=days))
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        with pytest.raises(Exception, match="clock"):
            client.kernel(PROBLEM)

    assert not list((tmp_path / "cache" / "artifacts").iterdir())


def test_what_is_recorded_wrong_is_revoked_at_once(
    site: Site, build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trial,) = site.repository.trials()
    wrong = build_wrong(trial)

    site.repository.add_trial(wrong)

    assert site.repository.revocations().artifacts == (build.artifact.sha256,)
    keep_trial(site.repository, build, cpu=detect_cpu(), speed=10)
    with site.serving() as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
    assert isinstance(kernel, FallbackKernel)
    assert run(["audit", "--db", site.settings.database_url]) == 0
    assert f"recorded wrong for {PROBLEM.text}" in capsys.readouterr().out


def test_what_is_imported_revokes_nothing(site: Site) -> None:
    (trial,) = site.repository.trials()

    site.repository.add_imported([build_wrong(trial)])

    assert site.repository.revocations() == Revocations(number=0, artifacts=(), key_ids=())


def test_the_list_is_signed_tagged_and_grows(site: Site, build: Build) -> None:
    keys = {site.key_pair.key_id: site.key_pair.public_key}
    with (
        site.serving() as address,
        httpx.Client(base_url=address, timeout=60, trust_env=False) as http,
    ):
        empty = http.get("/v1/revocations")
        unchanged = http.get("/v1/revocations", headers={"If-None-Match": empty.headers["ETag"]})
        revoke(site, build)
        changed = http.get("/v1/revocations", headers={"If-None-Match": empty.headers["ETag"]})

    assert (empty.status_code, unchanged.status_code, changed.status_code) == (200, 304, 200)
    assert empty.headers["ETag"] == f'"{sha256(empty.content).hexdigest()}"'
    assert open_revocations(empty.content, keys, NOW).number == 0
    assert open_revocations(changed.content, keys, NOW).artifacts == (build.artifact.sha256,)
    with pytest.raises(SignatureInvalid, match="not pinned"):
        open_revocations(changed.content, {}, NOW)


def test_the_list_is_bounded_and_holds_the_newest(site: Site, tmp_path: Path) -> None:
    engine = open_database(site.settings.database_url)
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO revocations (subject, reason, created_at, is_lifted) "
                "VALUES (:subject, 'many', '2026-01-01T00:00:00+00:00', FALSE)"
            ),
            [{"subject": f"{number:064x}"} for number in range(MAX_REVOCATIONS + 1)],
        )
    engine.dispose()

    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    (kept,) = (tmp_path / "cache" / "revocations").iterdir()
    found = json.loads(kept.read_bytes())
    assert found["number"] == MAX_REVOCATIONS + 1
    assert len(found["artifacts"]) == MAX_REVOCATIONS
    assert found["artifacts"][0] == f"{MAX_REVOCATIONS:064x}"


def test_what_cannot_be_revoked_or_was_already_is_said(
    site: Site, build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--reason", "none", "--db", site.settings.database_url]

    assert run(["revoke", CANDIDATE.text, *where]) == WRONG_USAGE
    assert "neither the sha256 of a kernel" in capsys.readouterr().err
    assert run(["revoke", build.artifact.sha256, "--lift", *where]) == ANSWER_IS_NO
    revoke(site, build)
    assert run(["revoke", build.artifact.sha256, *where]) == ANSWER_IS_NO
