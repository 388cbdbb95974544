"""Many processes that start at once, a cache that cannot be kept, and what is not asked again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path

import pytest
from relay import Instead
from served import PROBLEM, Site, keep_trial

from gemm_tuner import Client
from gemm_tuner.build.compile import Build
from gemm_tuner.client import loading
from gemm_tuner.client.cache import Cache
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel

PROCESSES = 40


def _fork(work: Callable[[], bool]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return child


def _codes(children: list[int]) -> set[int]:
    return {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}


@pytest.mark.proof
def test_of_many_processes_that_start_at_once_one_downloads_and_keeps(
    site: Site, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a loaded machine, forty processes need longer than one would wait for another.
    monkeypatch.setattr(loading, "_LONGEST_WAIT_S", 60.0)
    said, says = os.pipe()
    keep = Cache.keep_artifact

    def tell_and_keep(cache: Cache, digest: str, binary: bytes) -> None:
        os.write(says, b"x")
        keep(cache, digest, binary)

    monkeypatch.setattr(Cache, "keep_artifact", tell_and_keep)
    # Of so many that ask at once a service refuses some for a moment: the first to download, here.
    downloads = Instead(
        f"/v1/artifacts/sha256/{build.artifact.sha256}", HTTPStatus.TOO_MANY_REQUESTS
    )
    with site.serving(around=downloads) as address:
        Client(address, cache_dir=tmp_path / "other").resolve(PROBLEM)  # remembers the key
        clients_may_start, start = os.pipe()

        def work() -> bool:
            os.close(start)
            os.read(clients_may_start, 1)
            client = Client(address, cache_dir=tmp_path / "cache", timeout_s=120)
            return isinstance(client.kernel(PROBLEM), Kernel)

        children = [_fork(work) for _process in range(PROCESSES)]
        os.close(clients_may_start)
        os.close(start)
        codes = _codes(children)

    assert codes == {0}
    assert downloads.asked >= 2
    assert downloads.answered == 1
    assert os.read(said, 2 * PROCESSES) == b"x"


def test_who_waits_too_long_for_another_process_fetches(tmp_path: Path) -> None:
    one, other = Cache(tmp_path / "cache"), Cache(tmp_path / "cache")
    with one.fetching("a", 1), other.fetching("a", 0.01):
        other.keep_artifact("a", b"binary")

    assert (tmp_path / "cache" / "artifacts" / "a").read_bytes() == b"binary"


def test_who_waits_goes_on_with_what_came_and_not_with_a_damaged_copy(tmp_path: Path) -> None:
    one, other = Cache(tmp_path / "cache"), Cache(tmp_path / "cache")
    digest = sha256(b"binary").hexdigest()
    one.keep_artifact(digest, b"damaged")
    started = time.monotonic()

    with one.fetching(digest, 1):
        with other.fetching(digest, 0.2):
            waited_s = time.monotonic() - started
        one.keep_artifact(digest, b"binary")
        with other.fetching(digest, 60):
            assert other.artifact(digest) == b"binary"

    assert waited_s >= 0.2


def test_a_process_killed_while_it_writes_leaves_nothing_that_is_loaded(
    site: Site, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, says = os.pipe()

    def stop_before_the_rename(_path: Path, _target: Path) -> None:
        os.write(says, b"x")
        signal.pause()

    def work() -> bool:
        monkeypatch.setattr(Path, "replace", stop_before_the_rename)
        with cache.fetching(build.artifact.sha256, 60):
            cache.keep_artifact(build.artifact.sha256, build.binary[:100])
        return False

    cache = Cache(tmp_path / "cache")
    child = _fork(work)
    assert os.read(said, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    assert _codes([child]) == {-signal.SIGKILL}

    assert len(list((tmp_path / "cache" / "artifacts").iterdir())) == 1
    with site.serving() as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
    assert isinstance(kernel, Kernel)
    assert cache.artifact(build.artifact.sha256) == build.binary


def test_without_a_cache_directory_kernels_come_and_one_warning(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")

    with site.serving() as address:
        kernel = Client(address, cache_dir=tmp_path / "file" / "cache").kernel(PROBLEM)

    assert isinstance(kernel, Kernel)
    assert len([one for one in caplog.records if "cache does not keep" in one.message]) == 1


def test_what_has_no_kernel_is_not_asked_again_until_it_is_asked_anew(
    site: Site, build: Build, tmp_path: Path
) -> None:
    asked = Instead("/v1/resolve")
    with site.serving(around=asked) as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        first = client.kernel("f32 1x2x3")
        assert client.kernel("f32 1x2x3") is first
        assert asked.asked == 1

        keep_trial(site.repository, build, cpu=detect_cpu(), speed=0.5)
        assert isinstance(client.kernel(PROBLEM), FallbackKernel)
        keep_trial(site.repository, build, cpu=detect_cpu(), speed=10)
        client.ask_anew()
        client.kernel(PROBLEM)

    assert asked.asked == 3


def test_a_service_that_is_away_is_not_asked_for_each_layer(site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        pass
    client = Client(address, cache_dir=tmp_path / "cache")
    assert isinstance(client.kernel(PROBLEM), FallbackKernel)
    with site.serving(port=int(address.rpartition(":")[2])):
        other = client.kernel("f32 1x2x3")
        client.ask_anew()
        kernel = client.kernel(PROBLEM)

    assert "and not again for this" in other.reason
    assert isinstance(kernel, Kernel)


def test_kernels_are_had_while_the_interpreter_ends(site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        program = f"""
import atexit
from pathlib import Path
from gemm_tuner import Client
client = Client({address!r}, cache_dir=Path({str(tmp_path / "cache")!r}))
atexit.register(lambda: print([type(one).__name__ for one in client.kernels([{PROBLEM.text!r}])]))
"""
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
        )

    assert (ended.stdout, ended.stderr) == ("['Kernel']\n", "")
