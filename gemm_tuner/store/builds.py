"""Reading and writing kernel binaries and their sources."""

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence

from sqlalchemy import select, update

from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.canonical import canonical_json
from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.integrity import attestation_of, check_digest, check_named_source, decompress
from gemm_tuner.store.reading import describes, who_attests
from gemm_tuner.store.revocations import revoked_among
from gemm_tuner.store.sql.statements import Statements, insert_new, insert_or_replace
from gemm_tuner.store.sql.tables import artifacts, sources
from gemm_tuner.store.verdicts.deriving import Deriving
from gemm_tuner.store.wire.record import WireArtifact
from gemm_tuner.trust.attestation import Attestation, Statement


class Builds(Statements):
    """The binaries and sources of one database, by their sha256."""

    def add_build(self, artifact: Artifact, *, binary: bytes, source_text: str) -> None:
        """Keep a binary and its source, attested. Those already there stay, if they are believed.

        Raises:
            StoreFailed: the bytes are not those that `artifact` names.
            InvalidSetting: the measuring key cannot be used.
        """
        is_held = artifact.sha256 in self.held_artifacts([artifact.sha256])
        self._keep_build(artifact, binary, source_text, replaces=not is_held)

    def replace_build(self, artifact: Artifact, *, binary: bytes, source_text: str) -> None:
        """Replace a damaged binary and its source.

        Raises:
            StoreFailed: the bytes are not those that `artifact` names.
            InvalidSetting: the measuring key cannot be used.
        """
        self._keep_build(artifact, binary, source_text, replaces=True)

    def holds(self, artifact: Artifact) -> bool:
        """Return whether a binary and its source are in the store, undamaged and believed.

        One that is revoked is held, too: to build it again would change nothing.
        """
        digest = artifact.sha256
        if any(reason for _digest, _by, reason in self._attestations([digest])):
            return False
        try:
            contents = (self._kept_binary(digest), self.source_text(digest))
        except StoreFailed:
            return False
        return None not in contents

    def held_artifacts(self, digests: Collection[str]) -> Mapping[str, str]:
        """Return those of `digests` whose binaries may be served, each with who attests it.

        That is a public key in hex.
        """
        attested = {
            digest: attestation.public_key
            for digest, attestation, reason in self._attestations(digests)
            if reason is None and attestation is not None
        }
        revoked = self._revoked(attested)
        return {digest: key for digest, key in attested.items() if digest not in revoked}

    def refused_artifacts(self, digests: Collection[str]) -> Mapping[str, str]:
        """Return those of `digests` whose binaries are in the store but not served, and why."""
        unattested = {
            digest: reason
            for digest, _by, reason in self._attestations(digests)
            if reason is not None
        }
        return unattested | self._revoked(digests)

    def artifact_digests(self) -> Sequence[str]:
        """Return the digests of all binaries, in their order."""
        with self._reading() as connection:
            return connection.scalars(select(artifacts.c.sha256).order_by(artifacts.c.sha256)).all()

    def binary(self, sha256: str) -> bytes | None:
        """Return the binary with this digest; one that may not be served is none."""
        if sha256 not in self.held_artifacts([sha256]):
            return None
        return self._kept_binary(sha256)

    def artifact_from(self, digest: str) -> str | None:
        """Return the first digest of a binary that is not below `digest`, else the first of all."""
        query = select(artifacts.c.sha256).order_by(artifacts.c.sha256).limit(1)
        row = self._first(query.where(artifacts.c.sha256 >= digest)) or self._first(query)
        return None if row is None else row[0]

    def source_text(self, sha256: str) -> str | None:
        """Return the source of the binary with this digest, as the artifact's document names it.

        Raises:
            StoreFailed: a column names another, or it is damaged.
        """
        row = self._first(
            select(sources.c.sha256, sources.c.compressed_text, artifacts.c.document)
            .join(artifacts, artifacts.c.source_sha256 == sources.c.sha256)
            .where(artifacts.c.sha256 == sha256)
        )
        if row is None:
            return None
        check_named_source(sha256, row.document, row.sha256)
        return decompress("source", row.sha256, row.compressed_text).decode()

    def attest_artifacts(self) -> int:
        """Attest with the own key what no believed key attests, and return how many there were.

        What is damaged stays as it is.

        Raises:
            InvalidSetting: the measuring keys cannot be used.
        """
        attested = 0
        for digest, _by, reason in list(self._attestations(self.artifact_digests())):
            if reason is None:
                continue
            row = self._first(
                select(artifacts.c.document, artifacts.c.compressed_binary).where(
                    artifacts.c.sha256 == digest
                )
            )
            if row is None or not describes(row.document, digest):
                continue
            decompress("artifact", digest, row.compressed_binary)
            signed = self._keys.attest(Statement.ARTIFACT, row.document)
            with self._writing() as connection:
                connection.execute(
                    update(artifacts)
                    .where(artifacts.c.sha256 == digest)
                    .values(attested_by=signed.public_key, attestation=signed.signature)
                )
                Deriving(connection, self._keys).follow_build(digest)
            attested += 1
        return attested

    def _kept_binary(self, sha256: str) -> bytes | None:
        query = select(artifacts.c.compressed_binary).where(artifacts.c.sha256 == sha256)
        row = self._first(query)
        return None if row is None else decompress("artifact", sha256, row[0])

    def _revoked(self, digests: Collection[str]) -> dict[str, str]:
        """Return those of `digests` that are revoked, each with a clause on why."""
        if not digests:
            return {}
        with self._reading() as connection:
            revoked = revoked_among(connection, digests)
        return {digest: f"it is revoked: {reason}" for digest, reason in revoked.items()}

    def _attestations(
        self, digests: Collection[str]
    ) -> Iterator[tuple[str, Attestation | None, str | None]]:
        """Yield each artifact there is, who attests it, and why it is not served, if it is not."""
        if not digests:
            return
        query = select(
            artifacts.c.sha256,
            artifacts.c.document,
            artifacts.c.attested_by,
            artifacts.c.attestation,
        ).where(artifacts.c.sha256.in_(digests))
        with self._reading() as connection:
            rows = connection.execute(query).all()
        for row in rows:
            attestation = attestation_of(row.attested_by, row.attestation)
            _key, reason = who_attests(self._keys, row.sha256, row.document, attestation)
            yield row.sha256, attestation, reason

    def _keep_build(
        self, artifact: Artifact, binary: bytes, source_text: str, *, replaces: bool
    ) -> None:
        check_digest("artifact", artifact.sha256, binary)
        check_digest("source", artifact.source_sha256, source_text.encode())
        document = canonical_json(WireArtifact.of(artifact).model_dump(mode="json"))
        signed = self._keys.attest(Statement.ARTIFACT, document)
        put = insert_or_replace if replaces else insert_new
        with self._writing() as connection:
            put(
                connection,
                sources,
                sha256=artifact.source_sha256,
                compressed_text=zlib.compress(source_text.encode()),
            )
            put(
                connection,
                artifacts,
                sha256=artifact.sha256,
                document=document,
                source_sha256=artifact.source_sha256,
                compressed_binary=zlib.compress(binary),
                attested_by=signed.public_key,
                attestation=signed.signature,
            )
            Deriving(connection, self._keys).follow_build(artifact.sha256)
