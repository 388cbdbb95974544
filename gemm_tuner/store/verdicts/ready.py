"""Answers that are ready to be signed: each is made, and sealed, when its verdict is derived.

A user's own service answers with them. Another user cannot check the seal, and reads the verdict.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from gemm_tuner.answer.telling import measured_here, sentences
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.store.problems import problem_id
from gemm_tuner.trust.attestation import MeasuringKeys
from gemm_tuner.trust.key_id import key_id_of

# To be raised when answers say the same in other words or members: those of before are not used.
FORM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldArtifact:
    """What an artifact is served for: who attests its description, and how."""

    sha256: str
    document: str
    attested_by: str
    attestation: bytes


def sealed_about(
    problem_key: str,
    cpu_key: str,
    context: ExecutionContext,
    *,
    attestation: bytes,
    artifact: tuple[str, str, bytes] | None,
) -> bytes:
    """Return what a sealed answer is about: a question, its verdict, and the kernel that it names.

    The verdict is meant by its attestation, the kernel by its digest, description and attestation.
    If any of them is another than when the answer was made, then so may be the answer.
    """
    asked = f"answer {FORM} {problem_key} {context.threads} {context.regime.value} {cpu_key}"
    digest, document, signature = artifact or ("-", "", b"")
    parts = (asked.encode(), attestation, digest.encode(), document.encode(), signature)
    return b"".join(b"%d %b " % (len(part), part) for part in parts)


def sealed_answer(
    keys: MeasuringKeys,
    verdict: Verdict,
    *,
    attestation: bytes,
    rests_on: Collection[str],
    held: HeldArtifact | None,
) -> bytes | None:
    """Return the answer to exactly the question of a verdict, sealed; None where it may change.

    `attestation` is that of the verdict's document, `rests_on` are the measuring keys of the trials
    that it follows from, and `held` is the kernel that it names. The answer may change with what is
    believed, unless all is the own key's, and with the quorum, unless one host is enough.
    """
    # Imported here: it loads models and signatures, and a store is asked more often than written.
    from gemm_tuner.answer.document import Unsigned  # noqa: PLC0415

    own, named = keys.own_made(), None
    if verdict.doubt or verdict.quorum > 1 or {*rests_on} - {own}:
        return None
    if verdict.artifact is not None:
        if held is None or held.attested_by != own:
            return None
        named = (held.sha256, held.document, held.attestation)
        verdict = replace(verdict, attested_by=key_id_of(bytes.fromhex(own)))
    answer = Unsigned.of(verdict, sentences(verdict, measured_here(verdict.cpu_key)))
    about = sealed_about(
        problem_id(verdict.problem),
        verdict.cpu_key,
        verdict.context,
        attestation=attestation,
        artifact=named,
    )
    return keys.seal(about, answer.packed())
