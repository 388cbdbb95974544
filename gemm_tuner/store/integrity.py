"""What is read from the database is what its key was made from, and no larger than it may be."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from math import isfinite
from typing import Any

from sqlalchemy import Row, Table

from gemm_tuner.domain.printable import quoted
from gemm_tuner.errors import InvalidSetting, StoreFailed
from gemm_tuner.trust.attestation import MAC_BYTES, SIGNATURE_BYTES, Attestation

MAX_CONTENT_BYTES = 2**26  # of a binary or a source; the largest generated ones have some 2**20


def digest_of(document: str) -> str:
    """Return the sha256 of a document."""
    return sha256(document.encode()).hexdigest()


def attestation_of(attested_by: str | None, content: bytes | None) -> Attestation | None:
    """Return the attestation in two columns, if there is one."""
    if not isinstance(attested_by, str) or not isinstance(content, bytes):
        return None  # SQLite keeps a value of any type in any column
    if len(content) != SIGNATURE_BYTES + MAC_BYTES:
        return Attestation(public_key=attested_by, signature=content)
    return Attestation(
        public_key=attested_by,
        signature=content[:SIGNATURE_BYTES],
        mac=content[SIGNATURE_BYTES:],
    )


def content_of(attestation: Attestation) -> bytes:
    """Return what the second column of an attestation holds."""
    return attestation.signature + attestation.mac


def check_digest(kind: str, key: str, content: bytes) -> None:
    """Check that `content` has the sha256 `key`.

    Raises:
        StoreFailed: it has another.
    """
    digest = sha256(content).hexdigest()
    if digest != key:
        raise StoreFailed(
            f"the {kind} {key[:12]} has bytes with the sha256 {digest[:12]}: it was damaged; "
            "restore the database from a backup, or start a new one with --db."
        )


def check_document(kind: str, key: str, document: str) -> None:
    """Check that a document is text with the sha256 `key`.

    Raises:
        StoreFailed: it is not; SQLite keeps a value of any type in any column.
    """
    check_digest(kind, key, document.encode() if isinstance(document, str) else b"")


@contextmanager
def as_row(what: str) -> Iterator[None]:
    """Turn the `InvalidSetting` of a noun into `StoreFailed`: a row made it, no question.

    `what` names the row.
    """
    try:
        yield
    except InvalidSetting as error:
        raise StoreFailed(
            f"the {what} cannot be read: {error} It was damaged; restore the database from a "
            "backup, or start a new one with --db."
        ) from error


def check_types(table: Table, row: Row[*tuple[Any, ...]]) -> None:
    """Check that the values of a row have the types of the columns of `table` with their names.

    Raises:
        StoreFailed: one has another, or is no finite number.
    """
    types = _types_of(table)
    for name, value in row._mapping.items():  # noqa: SLF001 - part of its interface
        kind = types.get(str(name))
        if kind is None or value is None:
            continue
        if not isinstance(value, kind) or (isinstance(value, float) and not isfinite(value)):
            raise StoreFailed(
                f"the column {name} of {table.name} holds {quoted(repr(value))}, which gemm-tuner "
                "did not store: it was damaged; restore the database from a backup, or start a new "
                "one with --db."
            )


@cache
def _types_of(table: Table) -> dict[str, tuple[type, ...]]:
    types = {column.name: column.type.python_type for column in table.columns}
    return {name: (int, float) if kind is float else (kind,) for name, kind in types.items()}


def check_named_source(artifact: str, document: str, source: str) -> None:
    """Check that the document of an artifact names the source with this sha256.

    Raises:
        StoreFailed: it names another.
    """
    if f'"source_sha256":"{source}"' not in str(document):
        raise StoreFailed(
            f"the artifact {artifact[:12]} was compiled from another source than the row says: it "
            "was damaged; restore the database from a backup, or start a new one with --db."
        )


def decompress(kind: str, key: str, compressed: bytes) -> bytes:
    """Return the bytes with the sha256 `key`.

    Raises:
        StoreFailed: they have another, or are more than `MAX_CONTENT_BYTES`.
    """
    try:
        # One byte more than may be shows that there is more, and costs no memory for it.
        content = zlib.decompressobj().decompress(compressed, MAX_CONTENT_BYTES + 1)
    except (zlib.error, TypeError):
        content = b""
    if len(content) > MAX_CONTENT_BYTES:
        raise StoreFailed(
            f"the {kind} {key[:12]} has more than {MAX_CONTENT_BYTES} bytes: it was not stored by "
            "gemm-tuner; restore the database from a backup, or start a new one with --db."
        )
    check_digest(kind, key, content)
    return content
