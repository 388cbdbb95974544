"""Questions as they are asked again and again: the same text is parsed once."""

import json
from functools import lru_cache

from gemm_tuner.domain.problem import Problem
from gemm_tuner_service.answering.answers import Asked
from gemm_tuner_service.answering.cpus import Cpus
from gemm_tuner_service.middleware.named_twice import members
from gemm_tuner_service.schemas import ResolveRequest

MAX_KNOWN = 8192
MAX_KNOWN_BYTES = 4096  # of a body; a longer one is parsed each time
MAX_KNOWN_TEXT = 256  # of a problem; a longer one, with blanks or many steps, likewise


class Questions:
    """The bodies of `POST /v1/resolve` that one process parsed last."""

    def __init__(self, cpus: Cpus) -> None:
        self._cpus = cpus
        self._known = lru_cache(maxsize=MAX_KNOWN)(self._parse)

    def in_body(self, body: bytes) -> Asked:
        """Return the question in a body.

        Raises:
            ValueError: it is no JSON, or not of the schema, or gives a name twice.
            RecursionError: it is nested too deeply.
            InvalidInput: the problem, CPU or context is none.
        """
        return self._known(body) if len(body) <= MAX_KNOWN_BYTES else self._parse(body)

    def _parse(self, body: bytes) -> Asked:
        question = ResolveRequest.model_validate(json.loads(body, object_pairs_hook=members))
        return Asked.of(
            question.to_problem(), self._cpus.described(question.cpu), question.to_context()
        )


def problem_in(text: str) -> Problem:
    """Return the problem in a text. Many machines ask for the layers of one model.

    Raises:
        InvalidInput: the text is none.
    """
    return _known(text) if len(text) <= MAX_KNOWN_TEXT else Problem.parse(text)


_known = lru_cache(maxsize=MAX_KNOWN)(Problem.parse)
