import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from samples import CONTEXT, CPU, PROBLEM, make_trial, make_trial_beside_mkl

from gemm_tuner.derive import derive_verdict, no_verdict
from gemm_tuner.domain.verdict import Decision, Verdict
from gemm_tuner.errors import InvalidSetting, SignatureInvalid, StoreFailed, VerdictExpired
from gemm_tuner.trust.key_id import key_id_of
from gemm_tuner.trust.keys import KeyPair
from gemm_tuner.trust.payload import VerdictPayload
from gemm_tuner.trust.signature import SignedVerdict, open_verdict, sign_verdict

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
TUNED = derive_verdict(
    [make_trial()], problem=PROBLEM, cpu_key=CPU.exact_key, context=CONTEXT, complete=True
)


def make_bytes(verdict: Verdict = TUNED) -> bytes:
    return make_payload(verdict).model_dump_json().encode()


def make_payload(verdict: Verdict = TUNED) -> VerdictPayload:
    return VerdictPayload.of(verdict, issued_at=NOW, expires_at=NOW + timedelta(days=30), serial=7)


@pytest.fixture(scope="module")
def key_pair(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return KeyPair.load_or_create(tmp_path_factory.mktemp("keys") / "key.pem")


@pytest.fixture
def envelope(key_pair: KeyPair) -> SignedVerdict:
    return sign_verdict(make_bytes(), key_pair)


@pytest.fixture
def pinned(key_pair: KeyPair) -> dict[str, bytes]:
    return {key_pair.key_id: key_pair.public_key}


def flip_first_bit(text: str) -> str:
    content = b64decode(text)
    return b64encode(bytes([content[0] ^ 1]) + content[1:]).decode()


@pytest.mark.parametrize("verdict", [TUNED, no_verdict(PROBLEM, cpu_key="k", context=CONTEXT)])
def test_a_signed_verdict_reads_back(
    verdict: Verdict, key_pair: KeyPair, pinned: dict[str, bytes]
) -> None:
    envelope = sign_verdict(make_bytes(verdict), key_pair)

    assert open_verdict(envelope, pinned, NOW) == make_payload(verdict)


def test_the_payload_says_what_is_served() -> None:
    payload = make_payload()

    assert payload.problem == "f32 128x3072x768 nk bias+gelu_erf"
    assert payload.decision is Decision.TUNED
    assert payload.artifact is not None
    assert payload.artifact.to_domain() == make_trial().artifact
    assert payload.ratio is not None
    assert payload.ratio.median == pytest.approx(1.25)
    assert payload.compared_with is not None
    assert payload.comparison == TUNED.comparison
    assert payload.compared_with.text == "onednn 3.2.0"


def test_the_payload_names_the_library_that_runs_instead() -> None:
    verdict = derive_verdict(
        [make_trial_beside_mkl()],
        problem=PROBLEM,
        cpu_key=CPU.exact_key,
        context=CONTEXT,
        complete=True,
    )

    payload = make_payload(verdict)

    assert payload.artifact is not None
    assert payload.instead is not None
    assert payload.instead.library.text == "onednn 3.2.0"
    assert payload.instead.library.package == "onednn-cpu-gomp 2023.2.0"
    assert payload.comparison == verdict.comparison


def test_a_verdict_of_a_service_that_names_no_library_is_read(
    key_pair: KeyPair, pinned: dict[str, bytes]
) -> None:
    facts = json.loads(make_bytes())
    del facts["compared_with"], facts["instead"]

    verdict = open_verdict(sign_verdict(json.dumps(facts).encode(), key_pair), pinned, NOW)

    assert (verdict.compared_with, verdict.comparison) == (None, None)


def test_of_two_verdicts_the_later_day_and_then_the_serial_says_which_is_older() -> None:
    ages = [
        VerdictPayload.of(TUNED, issued_at=issued_at, expires_at=NOW, serial=serial).age
        for issued_at, serial in (
            (NOW - timedelta(days=1), 9),
            (NOW, 7),
            (NOW, 8),
            (NOW + timedelta(days=1), 1),
        )
    ]

    assert ages == sorted(ages)
    assert len(set(ages)) == 4


@pytest.mark.parametrize(
    "tamper",
    [
        lambda e: e.model_copy(update={"payload": flip_first_bit(e.payload)}),
        lambda e: e.model_copy(update={"signature": flip_first_bit(e.signature)}),
        lambda e: e.model_copy(update={"signature": ""}),
        lambda e: e.model_copy(update={"signature": b64encode(bytes(64)).decode()}),
        lambda e: e.model_copy(update={"payload": "not base64!"}),
        lambda e: e.model_copy(update={"key_id": "0" * 16}),
        lambda e: e.model_copy(
            update={
                "payload": b64encode(
                    b64decode(e.payload).replace(b'"complete":true', b'"complete":false')
                ).decode()
            }
        ),
    ],
    ids=["payload", "signature", "no signature", "zeros", "no base64", "unknown key", "one fact"],
)
def test_a_tampered_verdict_is_refused(
    tamper: Callable[[SignedVerdict], SignedVerdict],
    envelope: SignedVerdict,
    pinned: dict[str, bytes],
) -> None:
    with pytest.raises(SignatureInvalid):
        open_verdict(tamper(envelope), pinned, NOW)


def test_a_verdict_by_another_key_is_refused(
    envelope: SignedVerdict, key_pair: KeyPair, tmp_path: Path
) -> None:
    other = KeyPair.load_or_create(tmp_path / "other.pem")

    with pytest.raises(SignatureInvalid, match="not pinned"):
        open_verdict(envelope, {other.key_id: other.public_key}, NOW)
    with pytest.raises(SignatureInvalid, match="not by the key"):
        open_verdict(envelope, {key_pair.key_id: other.public_key}, NOW)


def test_a_signature_for_another_purpose_is_refused(
    key_pair: KeyPair, pinned: dict[str, bytes]
) -> None:
    payload = make_bytes()
    bare = b64encode(key_pair.private_key.sign(payload)).decode()
    envelope = sign_verdict(payload, key_pair).model_copy(update={"signature": bare})

    with pytest.raises(SignatureInvalid):
        open_verdict(envelope, pinned, NOW)


def test_an_expired_verdict_is_refused(envelope: SignedVerdict, pinned: dict[str, bytes]) -> None:
    open_verdict(envelope, pinned, NOW + timedelta(days=29, hours=23))

    with pytest.raises(VerdictExpired, match="held until 2026-12-20"):
        open_verdict(envelope, pinned, NOW + timedelta(days=30))


@pytest.mark.parametrize(
    ("hours", "error", "message"),
    [
        ((0, 32 * 24), SignatureInvalid, "more than 31 days"),
        ((-1000, 1000), SignatureInvalid, "more than 31 days"),
        ((1, 24), VerdictExpired, "holds only from"),
        ((9600, 9700), VerdictExpired, "holds only from"),
        ((0, -1), VerdictExpired, "held until"),
    ],
)
def test_a_verdict_with_dates_out_of_bounds_is_refused(
    hours: tuple[int, int],
    error: type[Exception],
    message: str,
    key_pair: KeyPair,
    pinned: dict[str, bytes],
) -> None:
    issued_at, expires_at = (NOW + timedelta(hours=each) for each in hours)
    payload = VerdictPayload.of(TUNED, issued_at=issued_at, expires_at=expires_at, serial=1)

    with pytest.raises(error, match=message):
        open_verdict(sign_verdict(payload.model_dump_json().encode(), key_pair), pinned, NOW)


def test_a_clock_that_is_a_little_behind_refuses_nothing(
    envelope: SignedVerdict, pinned: dict[str, bytes]
) -> None:
    assert open_verdict(envelope, pinned, NOW - timedelta(minutes=9)) == make_payload()


@pytest.mark.parametrize("content", [b"", b"junk", b"{}", b'{"problem": NaN}', b"[" * 100_000])
def test_a_signed_payload_of_unknown_form_is_refused(
    content: bytes, key_pair: KeyPair, pinned: dict[str, bytes]
) -> None:
    valid = sign_verdict(make_bytes(), key_pair)
    signed = b64encode(key_pair.private_key.sign(b"gemm-tuner verdict 1\n" + content)).decode()
    envelope = valid.model_copy(
        update={"payload": b64encode(content).decode(), "signature": signed}
    )

    with pytest.raises(SignatureInvalid, match="known form"):
        open_verdict(envelope, pinned, NOW)


def test_a_key_is_made_once_and_kept_private(tmp_path: Path) -> None:
    path = tmp_path / "private" / "key.pem"

    first = KeyPair.load_or_create(path)

    assert KeyPair.load_or_create(path).public_key == first.public_key
    assert first.key_id == key_id_of(first.public_key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in path.parent.iterdir()] == ["key.pem"]


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    KeyPair.load_or_create(path)
    path.chmod(0o644)

    with pytest.raises(InvalidSetting, match="chmod 600"):
        KeyPair.load_or_create(path)


def test_a_file_that_is_no_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_text("not a key")
    path.chmod(0o644)

    with pytest.raises(InvalidSetting, match="not an unencrypted PEM private key"):
        KeyPair.load_or_create(path)


def test_a_folder_that_cannot_be_made_is_a_clear_error() -> None:
    with pytest.raises(StoreFailed, match="cannot be read or made"):
        KeyPair.load_or_create(Path("/proc/none/key.pem"))
