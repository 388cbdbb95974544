"""From a problem to a called kernel, over real HTTP, and every way in which that is refused."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from libraries import take_libraries_away
from relay import Instead
from served import PROBLEM, Site, assert_computes, keep_trial

from gemm_tuner import Client
from gemm_tuner.build.compile import Build
from gemm_tuner.domain.measurement import Raced
from gemm_tuner.errors import (
    AbiMismatch,
    InvalidArray,
    InvalidProblem,
    InvalidSetting,
    ServiceFailed,
)
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.libraries.finish import built_finish
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database


def test_a_served_kernel_computes_the_layer(site: Site, build: Build, tmp_path: Path) -> None:
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        kernel = client.kernel(PROBLEM.text)

        assert isinstance(kernel, Kernel)
        assert kernel.artifact == replace(build.artifact, flags=())  # they are not signed
        assert_computes(kernel, PROBLEM)
        assert client.kernel(PROBLEM) is kernel


def test_kernels_come_from_the_cache_when_the_service_is_away(site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, Kernel)
    assert_computes(kernel, PROBLEM)


def test_a_served_kernel_says_what_computes_and_why(site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert kernel.library == f"gemm-tuner {version('gemm-tuner')}"
    assert kernel.reason.startswith(
        "tuned, measured on this CPU: 10.000 times the speed of the baseline"
    )
    assert isinstance(kernel, Kernel)
    assert kernel.comparison is not None
    assert kernel.comparison.ratio.median == 10


def test_without_service_and_cache_a_library_computes_and_says_why(tmp_path: Path) -> None:
    kernel = Client("http://127.0.0.1:9", cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert "http://127.0.0.1:9 does not answer" in kernel.reason
    assert_computes(kernel, PROBLEM)


def test_an_untuned_problem_falls_back_with_the_reason(site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel("f32 3x5x7")

    assert isinstance(kernel, FallbackKernel)
    assert "nothing was tuned for 'f32 3x5x7 nk none'" in kernel.reason


@pytest.mark.baseline("onednn")
def test_a_faster_baseline_is_what_computes(build: Build, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/slow.sqlite3"
    repository = Repository(open_database(url))
    keep_trial(repository, build, cpu=detect_cpu(), speed=0.5)
    slow = Site.at(url, tmp_path / "key.pem", repository)

    with slow.serving() as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert "0.500 times the speed of the baseline" in kernel.reason
    assert kernel.library.startswith("onednn 3.")
    assert kernel.threads == 1
    assert_computes(kernel, PROBLEM)


@pytest.mark.parametrize("baseline", ["onednn 3.2.0", "openblas 0.3.31 + pass"])
def test_the_library_that_was_faster_is_what_computes(
    baseline: str, build: Build, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/slow.sqlite3"
    repository = Repository(open_database(url))
    keep_trial(repository, build, cpu=detect_cpu(), speed=0.5, baseline=baseline)
    slow = Site.at(url, tmp_path / "key.pem", repository)

    with slow.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        kernel = client.kernel(PROBLEM)
        layer = client.layer(PROBLEM.n, PROBLEM.k, m=[8], epilogue="bias+relu")

    for one in (kernel, *layer.kernels):
        assert isinstance(one, FallbackKernel)
        assert f"The comparison was with {baseline}" in one.reason
    if built_finish() is not None:
        assert kernel.library.split()[0] == baseline.split(maxsplit=1)[0]
    assert_computes(kernel, PROBLEM)


@pytest.mark.parametrize(("speed", "is_served"), [(0.96, True), (0.6, False)])
def test_beside_a_library_that_cannot_run_here_what_would_run_decides(
    speed: float, build: Build, tmp_path: Path, *, is_served: bool
) -> None:
    url = f"sqlite:///{tmp_path}/beside_mkl.sqlite3"
    repository = Repository(open_database(url))
    raced = (
        Raced(package="mkl 2026.0.0", baseline="mkl 2026.0", call_ns=10_000.0),
        Raced(package="numpy 2.4.6", baseline="openblas 0.3.31 + pass", call_ns=13_000.0),
        Raced(package="onednn-cpu-gomp 2023.2.0", baseline="onednn 3.2.0", call_ns=14_000.0),
    )
    keep_trial(repository, build, cpu=detect_cpu(), speed=speed, baseline="mkl 2026.0", raced=raced)
    site = Site.at(url, tmp_path / "key.pem", repository)

    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        kernel = client.kernel(PROBLEM)
        layer = client.layer(PROBLEM.n, PROBLEM.k, m=[8], epilogue="bias+relu")

    for one in (kernel, *layer.kernels):
        assert isinstance(one, Kernel if is_served else FallbackKernel)
        assert (
            "times as fast but does not run in your process; this kernel is "
            f"{1.3 * speed:.2f} times as fast as openblas 0.3.31 + pass, which would run instead"
        ) in one.reason
    if not is_served and built_finish() is not None:
        assert kernel.library.startswith("openblas")
    assert_computes(kernel, PROBLEM)


def test_without_the_faster_baseline_numpy_computes_and_says_why(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_libraries_away(monkeypatch)
    url = f"sqlite:///{tmp_path}/slow.sqlite3"
    repository = Repository(open_database(url))
    keep_trial(repository, build, cpu=detect_cpu(), speed=0.5)
    slow = Site.at(url, tmp_path / "key.pem", repository)

    with slow.serving() as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert "0.500 times the speed of the baseline" in kernel.reason
    assert "oneDNN was taken away" in kernel.reason
    assert kernel.library.startswith("numpy 2.")
    assert_computes(kernel, PROBLEM)


@pytest.mark.parametrize("folder", ["artifacts", "answers"])
def test_a_damaged_cache_entry_is_fetched_again(folder: str, site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        for path in (tmp_path / "cache" / folder).iterdir():
            path.write_bytes(b"\0" * 100)

        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

        assert isinstance(kernel, Kernel)
    offline = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
    assert isinstance(offline, Kernel)


def test_an_unchanged_answer_is_not_sent_again(site: Site, tmp_path: Path) -> None:
    sent: list[tuple[str, bool]] = []

    def watch(path: str, body: bytes) -> bytes:
        sent.append((path, len(body) > 0))
        return body

    with site.serving(watch) as address:
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        sent.clear()
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, Kernel)
    assert sent == [("/v1/resolve", False)]


def test_a_kernel_that_lost_its_place_is_not_taken_from_the_cache(
    site: Site, build: Build, tmp_path: Path
) -> None:
    with site.serving() as address:
        first = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        keep_trial(site.repository, build, cpu=detect_cpu(), speed=0.5)

        second = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    offline = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
    assert isinstance(first, Kernel)
    assert isinstance(second, FallbackKernel)
    assert isinstance(offline, FallbackKernel)
    assert offline.reason == second.reason


def test_an_older_answer_does_not_bring_back_a_kernel_that_lost_its_place(
    site: Site, build: Build, tmp_path: Path
) -> None:
    answers: dict[str, bytes] = {}
    layer: dict[str, Any] = {"m": [8], "epilogue": PROBLEM.epilogue.text}

    def listen(path: str, body: bytes) -> bytes:
        answers[path] = body
        return body

    with site.serving(listen) as address:
        first = Client(address, cache_dir=tmp_path / "first")
        assert isinstance(first.kernel(PROBLEM), Kernel)
        assert isinstance(first.layer(PROBLEM.n, PROBLEM.k, **layer).kernels[0], Kernel)
    keep_trial(site.repository, build, cpu=detect_cpu(), speed=0.5)
    port = int(address.rpartition(":")[2])
    with site.serving(port=port):
        now = Client(address, cache_dir=tmp_path / "cache")
        assert isinstance(now.kernel(PROBLEM), FallbackKernel)
        now.layer(PROBLEM.n, PROBLEM.k, **layer)

    with site.serving(answers.get, port=port):
        then = Client(address, cache_dir=tmp_path / "cache")
        replayed = then.kernel(PROBLEM)
        layer_then = then.layer(PROBLEM.n, PROBLEM.k, **layer)

    assert isinstance(replayed, FallbackKernel)
    assert "0.500 times" in replayed.reason
    assert isinstance(layer_then.kernels[0], FallbackKernel)


def test_a_cached_kernel_of_another_abi_is_as_good_as_none(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        monkeypatch.setattr("gemm_tuner.domain.artifact.CALLED_ABI_VERSIONS", (99,))
        with pytest.raises(AbiMismatch):
            Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert "does not answer" in kernel.reason


def test_a_service_that_fails_is_as_one_that_is_away(site: Site, tmp_path: Path) -> None:
    with site.serving(around=Instead("/v1/resolve", 500)) as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert "was answered with 500" in kernel.reason


def test_a_cache_that_cannot_be_written_costs_no_kernel(
    site: Site, build: Build, tmp_path: Path
) -> None:
    # A folder in the place of the file: this write fails for every user, root too.
    (tmp_path / "cache" / "artifacts" / build.artifact.sha256).mkdir(parents=True)
    for folder in ("cache", "cache/artifacts"):
        (tmp_path / folder).chmod(0o700)

    with site.serving() as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, Kernel)


def test_a_kernel_in_memory_does_not_wait_for_the_network(site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        kernel = client.kernel(PROBLEM)

    assert client.kernel(PROBLEM) is kernel


def test_a_kernel_is_called_with_the_threads_it_was_asked_for(
    site: Site, build: Build, tmp_path: Path
) -> None:
    keep_trial(site.repository, build, cpu=detect_cpu(), speed=10, threads=2)

    with site.serving() as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM, threads=2)

    assert isinstance(kernel, Kernel)
    assert kernel.threads == 2
    assert_computes(kernel, PROBLEM)


def test_an_error_of_the_service_is_told(site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        client = Client(f"{address}/elsewhere", cache_dir=tmp_path / "cache")

        with pytest.raises(ServiceFailed, match=r"404: Not found: "):
            client.kernel(PROBLEM)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"problem": "f32 -1x2x3"}, InvalidProblem),
        ({"problem": "nonsense"}, InvalidProblem),
        ({"problem": "f32 0x2x3"}, InvalidProblem),
        ({"problem": PROBLEM, "threads": 0}, InvalidSetting),
        ({"problem": PROBLEM, "regime": "both"}, InvalidSetting),
    ],
)
def test_a_wrong_question_is_refused_before_it_is_sent(
    arguments: dict[str, object], error: type[Exception], tmp_path: Path
) -> None:
    client = Client("http://127.0.0.1:9", cache_dir=tmp_path / "cache")

    with pytest.raises(error):
        client.kernel(**arguments)  # type: ignore[call-overload]  # wrong on purpose


def test_a_layer_for_no_rows_is_refused_before_it_is_asked_for(tmp_path: Path) -> None:
    client = Client("http://127.0.0.1:9", cache_dir=tmp_path / "cache")

    with pytest.raises(InvalidProblem, match="f32 0x64x64 nk none' multiplies nothing"):
        client.layer(64, 64, m=[1, 0])


@pytest.mark.parametrize("where", ["kernel", "library"])
@pytest.mark.parametrize("name", ["x", "w", "out", "bias"])
def test_masked_arrays_are_refused(name: str, where: str, site: Site, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "x": np.zeros((8, 16), np.float32),
        "w": np.zeros((32, 16), np.float32),
        "out": np.zeros((8, 32), np.float32),
        "bias": np.zeros(32, np.float32),
    }
    arrays[name] = np.ma.masked_equal(arrays[name], 0)
    with site.serving() as address:
        asked = address if where == "kernel" else "http://127.0.0.1:9"
        kernel = Client(asked, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    with pytest.raises(InvalidArray, match=f"{name} is a MaskedArray"):
        kernel(arrays["x"], kernel.pack(arrays["w"]), out=arrays["out"], bias=arrays["bias"])
