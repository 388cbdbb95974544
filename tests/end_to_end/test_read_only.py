"""`resolve` and `serve` answer from a store that cannot be written."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from restricted import obeying_permissions
from served import PROBLEM, Site

from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.wire.record import WireCpu

GEMM_TUNER = [sys.executable, "-m", "gemm_tuner"]
LAYER = ["8", "32", "16", "--epilogue", "bias+relu"]


@pytest.fixture
def sealed(site: Site) -> Iterator[Site]:
    """Yield a place whose folder, with the database and the signing key, cannot be written."""
    assert site.key_pair
    site.repository._engine.dispose()
    folder = site.settings.signing_key_path.parent
    modes = {path: path.stat().st_mode for path in (folder, *folder.iterdir())}
    for path in modes:
        path.chmod(0o500)
    yield site
    for path, mode in modes.items():
        path.chmod(mode)


def test_resolve_answers(sealed: Site) -> None:
    command = [*GEMM_TUNER, "resolve", *LAYER, "--db", sealed.settings.database_url]

    told = subprocess.run(obeying_permissions(command), capture_output=True, text=True, check=False)

    assert (told.returncode, told.stderr) == (0, "")
    assert "kernel: scalar_f32" in told.stdout


def test_serve_answers_and_says_that_it_cannot_write(sealed: Site) -> None:
    options = ["--port", "0", "--key", str(sealed.settings.signing_key_path)]
    command = [*GEMM_TUNER, "serve", "--db", sealed.settings.database_url, *options]
    question = {
        "problem": PROBLEM.text,
        "cpu": WireCpu.of(detect_cpu()).model_dump(mode="json"),
    }

    with subprocess.Popen(obeying_permissions(command), stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stderr is not None
            said = [child.stderr.readline() for _line in range(3)]
            address = said[0].split()[2].rstrip(";")
            with httpx.Client(base_url=address, timeout=30, trust_env=False) as client:
                answer = client.post("/v1/resolve", json=question)
                artifact = client.get(answer.json()["verdict"]["artifact"]["url"])
        finally:
            child.terminate()

    assert "the database cannot be written, only read" in said[2]
    assert answer.status_code == 200
    assert artifact.status_code == 200


def test_a_sweep_says_at_once_that_it_cannot_write(sealed: Site, tmp_path: Path) -> None:
    command = [*GEMM_TUNER, "sweep", *LAYER, "--db", sealed.settings.database_url]

    told = subprocess.run(
        obeying_permissions(command), cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert told.returncode == 3
    assert "cannot be opened for writing" in told.stderr
