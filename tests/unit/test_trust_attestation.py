"""Attestations: what a measuring key says, and for whom that is a reason to serve a kernel."""

from dataclasses import replace
from pathlib import Path

import pytest

from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.store.integrity import attestation_of, content_of
from gemm_tuner.trust.attestation import Attestation, MeasuringKeys, Statement


@pytest.fixture
def keys(tmp_path: Path) -> MeasuringKeys:
    return MeasuringKeys(tmp_path / "own")


@pytest.fixture
def foreign(tmp_path: Path) -> MeasuringKeys:
    return MeasuringKeys(tmp_path / "foreign")


def test_the_own_attestation_is_believed_and_its_key_is_private(keys: MeasuringKeys) -> None:
    assert keys.own() is None

    attestation = keys.attest(Statement.TRIAL, "a trial")

    assert keys.why_not_believed(Statement.TRIAL, "a trial", attestation) is None
    assert keys.own() == attestation.public_key
    assert keys.own_path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("statement", "document"), [(Statement.TRIAL, "another"), (Statement.ARTIFACT, "a trial")]
)
def test_an_attestation_is_of_one_document_of_one_kind(
    keys: MeasuringKeys, statement: Statement, document: str
) -> None:
    attestation = keys.attest(Statement.TRIAL, "a trial")

    reason = keys.why_not_believed(statement, document, attestation)

    assert reason is not None
    assert "is not of these bytes" in reason


def test_a_verdict_of_the_own_key_is_believed_by_its_mac_without_its_signature(
    keys: MeasuringKeys,
) -> None:
    attestation = keys.attest(Statement.VERDICT, "a verdict")
    unsigned = replace(attestation, signature=b"\0" * 64)

    assert keys.why_not_believed(Statement.VERDICT, "a verdict", unsigned) is None
    assert keys.why_not_believed(Statement.VERDICT, "another", unsigned) is not None
    assert keys.why_not_believed(Statement.TRIAL, "a verdict", unsigned) is not None


def test_what_is_no_verdict_has_no_mac(keys: MeasuringKeys) -> None:
    attestation = keys.attest(Statement.TRIAL, "a trial")
    longer = replace(attestation, mac=keys.attest(Statement.VERDICT, "a trial").mac)

    assert attestation.mac == b""
    assert keys.why_not_believed(Statement.TRIAL, "a trial", longer) is not None


@pytest.mark.parametrize("length", [0, 63, 65, 66, 95, 97])
def test_a_column_of_another_length_is_no_attestation(keys: MeasuringKeys, length: int) -> None:
    attestation = keys.attest(Statement.VERDICT, "a verdict")
    content = (content_of(attestation) + b"x")[:length]

    read = attestation_of(attestation.public_key, content)

    assert attestation_of(attestation.public_key, content_of(attestation)) == attestation
    assert keys.why_not_believed(Statement.VERDICT, "a verdict", read) is not None


@pytest.mark.parametrize("mac", [b"", b"\0" * 32, b"\0"])
def test_without_a_valid_mac_the_signature_decides(keys: MeasuringKeys, mac: bytes) -> None:
    attestation = replace(keys.attest(Statement.VERDICT, "a verdict"), mac=mac)
    forged = replace(attestation, signature=b"\0" * 64)

    assert keys.why_not_believed(Statement.VERDICT, "a verdict", attestation) is None
    assert keys.why_not_believed(Statement.VERDICT, "a verdict", forged) is not None


def test_a_foreign_verdict_is_believed_by_its_signature_alone(
    keys: MeasuringKeys, foreign: MeasuringKeys
) -> None:
    keys.attest(Statement.VERDICT, "a verdict")
    attestation = foreign.attest(Statement.VERDICT, "a verdict")
    keys.accept(attestation.public_key)
    own_mac = keys.attest(Statement.VERDICT, "a verdict").mac
    forged = replace(attestation, signature=b"\0" * 64)

    def is_believed(one: Attestation) -> bool:
        return keys.why_not_believed(Statement.VERDICT, "a verdict", one) is None

    assert is_believed(attestation)
    assert not is_believed(forged)
    assert not is_believed(replace(forged, mac=own_mac))


def test_the_mac_of_a_key_that_was_replaced_is_not_believed(keys: MeasuringKeys) -> None:
    attestation = keys.attest(Statement.VERDICT, "a verdict")
    assert keys.why_not_believed(Statement.VERDICT, "a verdict", attestation) is None

    keys.own_path.unlink()

    assert keys.why_not_believed(Statement.VERDICT, "a verdict", attestation) is not None


def test_a_process_that_runs_attests_with_the_key_that_there_is(keys: MeasuringKeys) -> None:
    old = keys.attest(Statement.VERDICT, "{}")
    keys.own_path.unlink()

    new = keys.attest(Statement.VERDICT, "{}")

    assert new.public_key != old.public_key
    assert keys.believed() == {new.public_key}
    assert keys.why_not_believed(Statement.VERDICT, "{}", new) is None
    assert keys.unsealed([(b"a", keys.seal(b"a", b"content"))]) == [b"content"]


def test_without_attestation_the_command_that_attests_is_named(keys: MeasuringKeys) -> None:
    reason = keys.why_not_believed(Statement.TRIAL, "a trial", None)

    assert reason is not None
    assert "gemm-tuner records attest" in reason


def test_a_foreign_key_is_named_until_it_is_accepted_and_after_it_is_forgotten(
    keys: MeasuringKeys, foreign: MeasuringKeys
) -> None:
    attestation = foreign.attest(Statement.TRIAL, "a trial")

    def reason() -> str | None:
        return keys.why_not_believed(Statement.TRIAL, "a trial", attestation)

    refused = reason()
    assert refused is not None
    assert f"the key {attestation.key_id}," in refused
    assert f"gemm-tuner keys accept {attestation.public_key}" in refused

    keys.accept(attestation.public_key)
    assert reason() is None

    assert keys.forget(attestation.public_key)
    assert reason() == refused
    assert not keys.forget(attestation.public_key)


def test_a_key_that_is_no_point_of_the_curve_proves_nothing(keys: MeasuringKeys) -> None:
    attestation = keys.attest(Statement.TRIAL, "a trial")
    for digit in "0f2":
        keys.accept(digit * 64)
        false = replace(attestation, public_key=digit * 64)

        assert keys.why_not_believed(Statement.TRIAL, "a trial", false) is not None


@pytest.mark.parametrize("text", ["", "abc", "F" * 64, "a" * 63, "a" * 65, "../etc"])
def test_what_is_no_key_is_not_accepted(keys: MeasuringKeys, text: str) -> None:
    with pytest.raises(InvalidSetting, match="64 hex digits"):
        keys.accept(text)

    assert keys.accepted() == frozenset()


@pytest.mark.parametrize("name", ["own_path", "accepted_path"])
def test_files_that_others_can_write_are_refused(keys: MeasuringKeys, name: str) -> None:
    attestation = keys.attest(Statement.TRIAL, "a trial")
    keys.accept("a" * 64)
    path: Path = getattr(keys, name)
    path.chmod(0o666)

    with pytest.raises(InvalidSetting, match="chmod"):
        keys.why_not_believed(Statement.TRIAL, "a trial", attestation)


def test_a_damaged_file_of_accepted_keys_is_named(keys: MeasuringKeys) -> None:
    keys.accept("a" * 64)
    keys.accepted_path.write_text("not a key\n")

    with pytest.raises(InvalidSetting, match=r"measuring-keys\.txt holds 'not'"):
        keys.believed()


def test_a_place_where_no_key_can_be_made_is_named() -> None:
    with pytest.raises(StoreFailed, match="XDG_DATA_HOME"):
        MeasuringKeys(Path("/proc/none")).attest(Statement.TRIAL, "a trial")
