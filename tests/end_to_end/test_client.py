"""From a problem to a called kernel, over real HTTP, and every way in which that is refused."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from libraries import take_libraries_away
from relay import Instead
from served import CANDIDATE, PROBLEM, Edit, Site, keep_trial

from gemm_tuner import Client
from gemm_tuner.bench.inputs import InputKind, make_inputs
from gemm_tuner.bench.reference import compute_expected
from gemm_tuner.bench.tolerance import find_error
from gemm_tuner.build.compile import Build
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.measurement import Raced
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.verdict import Basis, Decision, Verdict
from gemm_tuner.errors import (
    AbiMismatch,
    InvalidArray,
    InvalidProblem,
    InvalidSetting,
    IsaNotUsable,
    KernelRejected,
    ServiceFailed,
    SignatureInvalid,
    StoreFailed,
)
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.libraries.finish import built_finish
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.store.database import open_database
from gemm_tuner.store.repository import Repository
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.trust.payload import VerdictPayload
from gemm_tuner.trust.signature import sign_verdict

SEED = 7
OTHER_CANDIDATE = Candidate.parse("scalar_f32_4x4 mc8_nc32_kc16 jc_ic_jr_ir")


def _assert_computes(kernel: Kernel | FallbackKernel, problem: Problem) -> None:
    inputs = make_inputs(problem, InputKind.NORMAL, SEED)
    out = np.empty((problem.m.high, problem.n), np.float32)

    packed = kernel.pack(inputs.w)
    operands: dict[str, Any] = {**inputs.operands}

    y = kernel(inputs.x, packed, out=out, **operands)

    assert y is out
    assert find_error(compute_expected(problem, inputs), out) is None


def test_a_served_kernel_computes_the_layer(site: Site, build: Build, tmp_path: Path) -> None:
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        kernel = client.kernel(PROBLEM.text)

        assert isinstance(kernel, Kernel)
        assert kernel.artifact == replace(build.artifact, flags=())  # they are not signed
        _assert_computes(kernel, PROBLEM)
        assert client.kernel(PROBLEM) is kernel


def test_kernels_come_from_the_cache_when_the_service_is_away(site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, Kernel)
    _assert_computes(kernel, PROBLEM)


def test_a_served_kernel_says_what_computes_and_why(site: Site, tmp_path: Path) -> None:
    with site.serving() as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert kernel.library == f"gemm-tuner {version('gemm-tuner')}"
    assert kernel.reason.startswith("tuned, basis measured: 10.000 times the speed of the baseline")


def test_without_service_and_cache_a_library_computes_and_says_why(tmp_path: Path) -> None:
    kernel = Client("http://127.0.0.1:9", cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert "http://127.0.0.1:9 does not answer" in kernel.reason
    _assert_computes(kernel, PROBLEM)


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
    _assert_computes(kernel, PROBLEM)


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
    _assert_computes(kernel, PROBLEM)


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
    _assert_computes(kernel, PROBLEM)


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
    _assert_computes(kernel, PROBLEM)


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
    _assert_computes(kernel, PROBLEM)


def test_a_cache_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)

    with pytest.raises(StoreFailed, match="can be written by others"):
        Client("http://127.0.0.1:9", cache_dir=tmp_path / "cache")


def test_a_remote_service_without_a_pinned_key_is_refused(tmp_path: Path) -> None:
    client = Client("http://192.0.2.1:8000", cache_dir=tmp_path / "cache")

    with pytest.raises(SignatureInvalid, match=r"gemm-tuner keys accept http://192\.0\.2\.1:8000"):
        client.kernel(PROBLEM)


def test_another_pinned_key_is_refused(site: Site, tmp_path: Path) -> None:
    other = KeyPair.load_or_create(tmp_path / "other.pem").public_key

    with site.serving() as address:
        client = Client(address, public_keys=[other], cache_dir=tmp_path / "cache")
        with pytest.raises(SignatureInvalid, match="not pinned"):
            client.kernel(PROBLEM)

    _assert_nothing_was_kept(tmp_path)


def test_keys_are_pinned_by_a_file(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = KeyPair.load_or_create(tmp_path / "other.pem")
    elsewhere = Site.at(site.settings.database_url, tmp_path / "other.pem", site.repository)
    with elsewhere.serving() as address:
        document = httpx.get(f"{address}/v1/keys", trust_env=False).content
    keys = tmp_path / "keys.json"
    keys.write_bytes(document)
    monkeypatch.setenv("GEMM_TUNER_KEYS", str(keys))

    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        with pytest.raises(SignatureInvalid, match="not pinned"):
            client.kernel(PROBLEM)
    assert other.key_id in document.decode()


def test_an_empty_list_of_keys_is_no_trust_on_first_use(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="no public key is given"):
        Client("http://127.0.0.1:9", public_keys=[], cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    "text", [None, "", "{}", '{"keys": []}', '{"keys": [{"public_key": "AAAA"}]}']
)
def test_a_file_without_keys_is_named(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.json"
    if text is not None:
        keys.write_text(text)
    monkeypatch.setenv("GEMM_TUNER_KEYS", str(keys))

    with pytest.raises(InvalidSetting, match="which holds no public keys"):
        Client("http://127.0.0.1:9", cache_dir=tmp_path / "cache")


def _flip_artifact(_site: Site, _build: Build) -> Edit:
    return lambda path, body: body[:-1] + b"\1" if "/artifacts/" in path else body


def _hide_artifact(_site: Site, _build: Build) -> Edit:
    return lambda path, body: None if "/artifacts/" in path else body


def _lengthen_artifact(_site: Site, _build: Build) -> Edit:
    return lambda path, body: body + b"\0" if "/artifacts/" in path else body


def _other_cpu(site: Site, build: Build) -> Edit:
    return _sign_anew(site, replace(_verdict(build), cpu_key="GenuineIntel-6-8f"))


def _flip_signature(_site: Site, _build: Build) -> Edit:
    def edit(document: dict[str, dict[str, str]]) -> None:
        signature = document["signed"]["signature"]
        document["signed"]["signature"] = ("B" if signature[0] == "A" else "A") + signature[1:]

    return _edit_answer(edit)


def _drop_signature(_site: Site, _build: Build) -> Edit:
    return _edit_answer(lambda document: document.pop("signed"))


def _needs_other_cpu(site: Site, build: Build) -> Edit:
    unusable = frozenset(IsaFeature) - detect_cpu().isa
    artifact = replace(build.artifact, required_isa=unusable)
    return _sign_anew(site, replace(_verdict(build), artifact=artifact))


def _other_abi(site: Site, build: Build) -> Edit:
    return _sign_anew(
        site, replace(_verdict(build), artifact=replace(build.artifact, abi_version=99))
    )


def _other_problem(site: Site, build: Build) -> Edit:
    return _sign_anew(site, replace(_verdict(build), problem=Problem.parse("f32 8x32x17")))


def _other_bytes(site: Site, build: Build) -> Edit:
    """Return what a thief of the key could do: sign a binary that is not the one served."""
    lie = replace(build.artifact, sha256="0" * 64)
    resign = _sign_anew(site, replace(_verdict(build), artifact=lie))
    return lambda path, body: build.binary if "/artifacts/" in path else resign(path, body)


def _verdict(build: Build) -> Verdict:
    return Verdict(
        problem=PROBLEM,
        cpu_key=detect_cpu().exact_key,
        context=ExecutionContext(),
        decision=Decision.TUNED,
        basis=Basis.MEASURED,
        complete=True,
        candidate=CANDIDATE,
        artifact=build.artifact,
    )


def _sign_anew(site: Site, verdict: Verdict) -> Edit:
    now = datetime.now(UTC)
    tomorrow = now + timedelta(days=1)
    payload = VerdictPayload.of(verdict, issued_at=now, expires_at=tomorrow, serial=1)
    signed = sign_verdict(payload.model_dump_json().encode(), site.key_pair).model_dump()
    return _edit_answer(lambda document: document.update(signed=signed))


def _edit_answer(change: Callable[[dict[str, dict[str, str]]], object]) -> Edit:
    def edit(path: str, body: bytes) -> bytes:
        if path != "/v1/resolve":
            return body
        document = json.loads(body)
        change(document)
        return json.dumps(document).encode()

    return edit


@pytest.mark.parametrize(
    ("make_edit", "error"),
    [
        (_flip_signature, SignatureInvalid),
        (_drop_signature, SignatureInvalid),
        (_other_problem, SignatureInvalid),
        (_other_cpu, SignatureInvalid),
        (_needs_other_cpu, IsaNotUsable),
        (_other_abi, AbiMismatch),
    ],
)
def test_what_cannot_be_trusted_or_used_is_refused_by_its_own_error(
    make_edit: Callable[[Site, Build], Edit],
    error: type[Exception],
    site: Site,
    build: Build,
    tmp_path: Path,
) -> None:
    with site.serving(make_edit(site, build)) as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        with pytest.raises(error):
            client.kernel(PROBLEM)

    _assert_nothing_was_kept(tmp_path)


@pytest.mark.parametrize(
    ("make_edit", "reason"),
    [
        (_flip_artifact, "the artifact has the sha256"),
        (_lengthen_artifact, "does not have the"),
        (_other_bytes, "the artifact has the sha256"),
        (_hide_artifact, "was answered with 404: not here"),
    ],
)
def test_a_download_that_fails_falls_back_with_its_reason(
    make_edit: Callable[[Site, Build], Edit],
    reason: str,
    site: Site,
    build: Build,
    tmp_path: Path,
) -> None:
    with site.serving(make_edit(site, build)) as address:
        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, FallbackKernel)
    assert reason in kernel.reason
    _assert_computes(kernel, PROBLEM)
    _assert_nothing_was_kept(tmp_path)
    assert list((tmp_path / "cache" / "answers").iterdir()) == []


def test_a_layer_whose_download_fails_falls_back_too(
    site: Site, build: Build, tmp_path: Path
) -> None:
    with site.serving(_hide_artifact(site, build)) as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        layer = client.layer(PROBLEM.n, PROBLEM.k, m=[8], epilogue=PROBLEM.epilogue.text)

    (kernel,) = layer.kernels
    assert isinstance(kernel, FallbackKernel)
    assert "was answered with 404" in kernel.reason
    assert list((tmp_path / "cache" / "answers").iterdir()) == []


@pytest.mark.parametrize("folder", ["artifacts", "answers"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_cache_entry_that_is_no_file_is_fetched_again(
    kind: str, folder: str, site: Site, tmp_path: Path
) -> None:
    with site.serving() as address:
        Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)
        for path in (tmp_path / "cache" / folder).iterdir():
            path.unlink()
            if kind == "pipe":
                os.mkfifo(path)
            else:
                path.symlink_to("/dev/zero")

        kernel = Client(address, cache_dir=tmp_path / "cache").kernel(PROBLEM)

    assert isinstance(kernel, Kernel)


def _assert_nothing_was_kept(tmp_path: Path) -> None:
    assert list((tmp_path / "cache" / "artifacts").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"problem": Problem.parse("f32 8x32x17 nk bias+relu")},
            "its problem is 'f32 8x32x16 nk bias",
        ),
        (
            {"problem": Problem.parse("f32 4x32x16 nk bias+relu")},
            "its problem is 'f32 8x32x16 nk bias",
        ),
        (
            {"problem": Problem.parse("f32 8x32x16 kn bias+relu")},
            "its problem is 'f32 8x32x16 nk bias",
        ),
        ({"problem": Problem.parse("f32 8x32x16 nk none")}, "its problem is 'f32 8x32x16 nk bias"),
        ({"candidate": OTHER_CANDIDATE}, "its candidate is 'scalar_f32_2x4"),
        ({"candidate": None}, "not which candidate it is"),
    ],
)
def test_a_signed_verdict_that_names_the_kernel_of_another_question_gives_none(
    changes: dict[str, Any], message: str, site: Site, build: Build, tmp_path: Path
) -> None:
    lie = replace(_verdict(build), **changes)
    with site.serving(_sign_anew(site, lie)) as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        with pytest.raises(KernelRejected, match=message):
            client.kernel(lie.problem)

    _assert_nothing_was_kept(tmp_path)


@pytest.mark.isa("avx2")
def test_a_signed_verdict_with_other_features_than_the_kernel_gives_none(
    site: Site, build: Build, tmp_path: Path
) -> None:
    artifact = replace(build.artifact, required_isa=frozenset({IsaFeature.AVX2}))
    with site.serving(_sign_anew(site, replace(_verdict(build), artifact=artifact))) as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        with pytest.raises(KernelRejected, match=r"required_isa is \[\], but \['avx2'\]"):
            client.kernel(PROBLEM)


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
