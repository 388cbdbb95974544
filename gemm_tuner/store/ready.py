"""Answers that are ready to be signed: each is made, and sealed, when its verdict is derived.

A user's own service answers with them. Another user cannot check the seal, and reads the verdict.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from gemm_tuner.answer.telling import measured_here, sentences
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.store.problems import problem_id
from gemm_tuner.trust.attestation import MeasuringKeys
from gemm_tuner.trust.key_id import key_id_of


def sealed_about(problem_key: str, cpu_key: str, context: ExecutionContext) -> str:
    """Return the line of text that a sealed answer is about."""
    return f"answer {problem_key} {context.threads} {context.regime.value} {cpu_key}"


def sealed_answer(
    keys: MeasuringKeys, verdict: Verdict, *, rests_on: Collection[str], held: Mapping[str, str]
) -> bytes | None:
    """Return the answer to exactly the question of a verdict, sealed; None where it may change.

    `rests_on` are the measuring keys of the trials that it follows from, and `held` those of the
    binaries that may be served. It may change with what is believed, unless all is the own key's.
    """
    # Imported here: it loads models and signatures, and a store is asked more often than written.
    from gemm_tuner.answer.document import Unsigned  # noqa: PLC0415

    own, artifact = keys.own_made(), verdict.artifact
    if verdict.doubt or {*rests_on} - {own} or (artifact and held.get(artifact.sha256) != own):
        return None
    if artifact:
        verdict = replace(verdict, attested_by=key_id_of(bytes.fromhex(own)))
    answer = Unsigned.of(verdict, sentences(verdict, measured_here(verdict.cpu_key)))
    about = sealed_about(problem_id(verdict.problem), verdict.cpu_key, verdict.context)
    return keys.seal(about, answer.packed())
