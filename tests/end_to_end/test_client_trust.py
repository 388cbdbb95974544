"""What a client refuses: keys, signatures, verdicts and downloads that are not to be trusted."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import CANDIDATE, PROBLEM, Edit, Site, assert_computes

from gemm_tuner import Client
from gemm_tuner.build.compile import Build
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.verdict import Basis, Decision, Verdict
from gemm_tuner.errors import (
    AbiMismatch,
    InvalidSetting,
    IsaNotUsable,
    KernelRejected,
    SignatureInvalid,
    StoreFailed,
)
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.trust.payload import VerdictPayload
from gemm_tuner.trust.signature import sign_verdict

OTHER_CANDIDATE = Candidate.parse("scalar_f32_4x4 mc8_nc32_kc16 jc_ic_jr_ir")


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
    assert_computes(kernel, PROBLEM)
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
