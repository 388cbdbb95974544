"""Reading rows: what they say, and whether that is believed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

from sqlalchemy import RowMapping, Select, select

from gemm_tuner.domain.record import Outcome, Trial
from gemm_tuner.errors import InvalidCandidate, InvalidRecord, InvalidSetting, StoreFailed
from gemm_tuner.store.integrity import attestation_of, check_document
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.sql.tables import cpus, trials
from gemm_tuner.store.wire.record import parse_record
from gemm_tuner.trust.attestation import Attestation, MeasuringKeys, Statement


def columns_of(trial: Trial) -> dict[str, str | int]:
    """Return what the columns of a row repeat of its trial, for queries to go by."""
    return {
        "problem_id": problem_id(trial.problem),
        "threads": trial.context.threads,
        "regime": trial.context.regime.value,
        "generator": trial.generator,
        "stage": trial.stage.value,
        "outcome": trial.outcome.value,
    }


def select_trials() -> Select[*tuple[Any, ...]]:
    """Return the query for rows that `read_trial` takes, in the order of insertion."""
    return (
        select(trials, cpus.c.exact_key, cpus.c.class_key)
        .join(cpus, cpus.c.id == trials.c.cpu_id)
        .order_by(trials.c.sequence)
    )


def read_trial(row: RowMapping) -> Trial:
    """Return the trial of a row of `select_trials`.

    Raises:
        StoreFailed: the document does not match its key or its columns, or is of a later version.
    """
    check_document("trial", row["id"], row["document"])
    try:
        trial = parse_record(row["document"])
    except InvalidRecord as error:
        raise StoreFailed(
            f"trial {row['id'][:12]} in the database cannot be read: {error}; update gemm-tuner."
        ) from error
    check_columns(trial, row)
    return trial


def check_columns(trial: Trial, row: RowMapping) -> None:
    """Check that the columns of a row say what its document does, which alone is attested.

    Raises:
        StoreFailed: they say something else.
    """
    said = columns_of(trial)
    said |= {"exact_key": trial.cpu.exact_key, "class_key": trial.cpu.class_key}
    others = [name for name, value in said.items() if row.get(name, value) != value]
    if others:
        raise StoreFailed(
            f"the trial {row['id'][:12]} has other values in its columns ({', '.join(others)}) "
            "than in its document: it was damaged; restore the database from a backup, or start a "
            "new one with --db."
        )


def why_not_believed(keys: MeasuringKeys, trial: Trial, row: RowMapping) -> str | None:
    """Return why a trial that was run here is no reason to serve a kernel, None if it is one.

    A failure counts whoever noted it.
    """
    if trial.outcome is not Outcome.CORRECT:
        return None
    return why_not_attested(keys, row) or why_in_another_order(trial)


def why_in_another_order(trial: Trial) -> str | None:
    """Return why a kernel has not the fixed order of additions of its problem, None if it may.

    Of several kernels for a range of m, those count that compute the m of the problem.
    """
    if not trial.problem.is_fixed:
        return None
    from gemm_tuner.space.limits import check_covers  # noqa: PLC0415 - seldom needed

    try:
        for rows, kernel in trial.candidate.kernels(trial.problem.m):
            check_covers(replace(trial.problem, m=rows), kernel)
    except InvalidCandidate as error:
        return str(error).removesuffix(".")
    return None


def why_not_attested(keys: MeasuringKeys, row: RowMapping) -> str | None:
    """Return why nobody who is believed attests a trial, None if someone does."""
    attestation = attestation_of(row["attested_by"], row["attestation"])
    with usable_keys():
        return keys.why_not_believed(Statement.TRIAL, row["document"], attestation)


def who_attests(
    keys: MeasuringKeys,
    sha256: str,
    document: str,
    attestation: Attestation | None,
) -> tuple[str | None, str | None]:
    """Return the public key that attests an artifact; or else None, and why it is not served."""
    with usable_keys():
        reason = keys.why_not_believed(Statement.ARTIFACT, str(document), attestation)
    if reason is None and not describes(document, sha256):
        reason = "its description is of another binary: the database was changed"
    if reason is not None or attestation is None:
        return None, reason
    return attestation.public_key, None


@contextmanager
def usable_keys() -> Iterator[None]:
    """Turn a fault of the files of keys into `StoreFailed`: who asks a store did not name them."""
    try:
        yield
    except InvalidSetting as error:
        raise StoreFailed(f"nothing in the store can be believed: {error}") from error


@lru_cache(maxsize=1024)
def describes(document: str, digest: str) -> bool:
    """Return whether the description of an artifact is of the binary with this sha256."""
    try:
        return bool(json.loads(document)["sha256"] == digest)
    except (ValueError, KeyError, TypeError):
        return False
