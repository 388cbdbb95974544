"""Reading rows: what they say, and whether that is believed."""

import json
from typing import Any

from sqlalchemy import Row

from gemm_tuner.domain.record import Outcome, Trial
from gemm_tuner.errors import InvalidRecord, StoreFailed
from gemm_tuner.store.integrity import attestation_of, check_digest
from gemm_tuner.store.wire import parse_record
from gemm_tuner.trust.attestation import Attestation, MeasuringKeys, Statement


def read_trial(key: str, document: str) -> Trial:
    """Return the trial of a row.

    Raises:
        StoreFailed: the document does not match its key, or is of a later version.
    """
    check_digest("trial", key, document.encode())
    try:
        return parse_record(document)
    except InvalidRecord as error:
        raise StoreFailed(
            f"trial {key[:12]} in the database cannot be read: {error}; update gemm-tuner."
        ) from error


def why_not_believed(keys: MeasuringKeys, row: Row[*tuple[Any, ...]]) -> str | None:
    """Return why a trial that was run here is no reason to serve a kernel, None if it is one."""
    if row.outcome != Outcome.CORRECT.value:
        return None
    attestation = attestation_of(row.attested_by, row.attestation)
    return keys.why_not_believed(Statement.TRIAL, row.document, attestation)


def who_attests(
    keys: MeasuringKeys,
    sha256: str,
    document: str,
    attestation: Attestation | None,
) -> tuple[str | None, str | None]:
    """Return the public key that attests an artifact; or else None, and why it is not served."""
    reason = keys.why_not_believed(Statement.ARTIFACT, document, attestation)
    if reason is None and not describes(document, sha256):
        reason = "its description is of another binary: the database was changed"
    if reason is not None or attestation is None:
        return None, reason
    return attestation.public_key, None


def describes(document: str, digest: str) -> bool:
    """Return whether the description of an artifact is of the binary with this sha256."""
    try:
        return bool(json.loads(document)["sha256"] == digest)
    except (ValueError, KeyError, TypeError):
        return False
