"""A scheduler is spoken to only where nobody else can pretend to be it."""

from pathlib import Path

import pytest

from gemm_tuner.cli.main import run
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.fleet.scheduler import Scheduler, scheduler_of


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / f"{name}.pem" for name in ("authority", "certificate", "key")}
    for file in found.values():
        file.touch()
    return found


def without_tls(address: str) -> Scheduler:
    return scheduler_of(address, authority=None, certificate=None, key=None)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.8.0.1"])
def test_a_scheduler_on_this_machine_needs_no_certificates(host: str) -> None:
    scheduler = without_tls(f"tcp://{host}:8786")

    assert scheduler.is_local
    assert scheduler.tls is None


@pytest.mark.parametrize("host", ["10.0.0.1", "fleet.example", "128.0.0.1", "[2001:db8::1]"])
def test_a_scheduler_elsewhere_needs_them(host: str, files: dict[str, Path]) -> None:
    with pytest.raises(InvalidSetting, match="could run code on the workers; use tls://"):
        without_tls(f"tcp://{host}:8786")

    scheduler = scheduler_of(f"tls://{host}:8786", **files)

    assert not scheduler.is_local
    assert scheduler.tls is not None
    assert scheduler.tls.key == files["key"]


@pytest.mark.parametrize(
    "address",
    ["", "fleet.example", "fleet:8786", "http://x:1", "tls://x", "tls://x:port", "tcp://[::1"],
)
def test_what_is_no_address_is_refused(address: str, files: dict[str, Path]) -> None:
    with pytest.raises(InvalidSetting, match=r"is no address; write it as tls://HOST:PORT"):
        scheduler_of(address, **files)


def test_tls_takes_all_three_files_or_none(files: dict[str, Path]) -> None:
    with pytest.raises(InvalidSetting, match="do not go together"):
        without_tls("tls://127.0.0.1:8786")
    with pytest.raises(InvalidSetting, match="do not go together"):
        scheduler_of("tcp://127.0.0.1:8786", **files)
    with pytest.raises(InvalidSetting, match="not complete"):
        scheduler_of("tls://x:8786", authority=files["authority"], certificate=None, key=None)
    files["key"].unlink()
    with pytest.raises(InvalidSetting, match=r"key\.pem cannot be read"):
        scheduler_of("tls://x:8786", **files)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["worker", "--scheduler", "tcp://10.0.0.1:1"], "use tls://"),
        (["dispatch", "--scheduler", "tcp://10.0.0.1:1"], "use tls://"),
        (["sweep", "8", "8", "8", "--scheduler", "tcp://10.0.0.1:1"], "use tls://"),
        (["worker", "--tls-ca", "ca.pem"], "are for --scheduler; add it"),
        (["sweep", "8", "8", "8", "--cpu", "x"], "add --scheduler"),
        (
            ["sweep", "8", "8", "8", "--scheduler", "tcp://127.0.0.1:1", "--again"],
            "--again is for a sweep on this machine",
        ),
    ],
)
def test_commands_refuse_it_with_a_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2

    assert told in capsys.readouterr().err
