"""The answer of a service to a question for a kernel."""

import json
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from gemm_tuner.errors import SignatureInvalid
from gemm_tuner.trust.signature import SignedVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A signed verdict, not yet checked, the service's reasons, and the document they came in."""

    document: bytes
    envelope: SignedVerdict
    explain: tuple[str, ...]


class _ResolveDocument(BaseModel):
    # Whatever else the document says is for people: only the envelope is believed.
    model_config = ConfigDict(frozen=True, extra="ignore")

    signed: SignedVerdict
    explain: tuple[str, ...]


class _ItemDocument(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    resolution: _ResolveDocument


class _BatchDocument(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    results: tuple[_ItemDocument, ...]


def parse_answer(document: bytes) -> Answer:
    """Return the answer in a JSON document.

    Raises:
        SignatureInvalid: it holds no signed verdict.
    """
    try:
        parsed = _ResolveDocument.model_validate_json(document)
    except ValidationError as error:
        raise SignatureInvalid(
            f"the answer holds no signed verdict ({error.error_count()} faults); "
            "nothing was loaded: check the address of the service."
        ) from None
    return Answer(document=document, envelope=parsed.signed, explain=parsed.explain)


def parse_answers(document: bytes, count: int) -> list[Answer | None]:
    """Return the answers to a batch of `count` questions, None for each that met an error.

    Raises:
        SignatureInvalid: there are not so many.
    """
    try:
        results = [item.get("resolution") for item in json.loads(document)["results"]]
        found = [json.dumps(one).encode() if one else None for one in results]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        found = []
    if len(found) != count:
        raise SignatureInvalid(
            f"the answer to {count} problems holds {len(found)} results; nothing was loaded: "
            "check the address of the service."
        )
    return [None if one is None else parse_answer(one) for one in found]


def parse_envelopes(document: bytes) -> tuple[SignedVerdict, ...]:
    """Return the signed verdicts in the answer to a batch of questions, not yet checked.

    Raises:
        SignatureInvalid: it holds none, or not one for each question.
    """
    try:
        parsed = _BatchDocument.model_validate_json(document)
    except ValidationError as error:
        raise SignatureInvalid(
            "the answer does not hold a signed verdict for each problem "
            f"({error.error_count()} faults); nothing was loaded: check the address of the service."
        ) from None
    return tuple(item.resolution.signed for item in parsed.results)
