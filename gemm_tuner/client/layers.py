"""The kernels of a layer: for some m what is locked, for the others what one answer names."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from gemm_tuner.client.answer import parse_envelopes
from gemm_tuner.client.belief import Belief
from gemm_tuner.client.cache import Cache
from gemm_tuner.client.keys import Keys
from gemm_tuner.client.loading import Loader
from gemm_tuner.client.locked import Locked
from gemm_tuner.client.question import LayerQuestion, NotFetched
from gemm_tuner.client.requests import Requests
from gemm_tuner.client.transport import Asking, Session
from gemm_tuner.errors import (
    IsaNotUsable,
    KernelRejected,
    QuestionNotKnown,
    ServiceUnreachable,
    SignatureInvalid,
)
from gemm_tuner.libraries.fallback import NoKernel
from gemm_tuner.runtime.layer import Layer, make_layer
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.trust.payload import VerdictPayload

# A verdict that was checked, and the id of the key that signed it.
_Given = tuple[VerdictPayload, str]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Finds the layers that one client is asked for."""

    requests: Requests
    belief: Belief
    cache: Cache
    loader: Loader
    locked: Locked

    def find(self, question: LayerQuestion, asking: Asking) -> Layer:
        """Return a layer: of what is locked, and else of what is answered now, or was before.

        Raises:
            KernelRejected: an answer or a kernel cannot be trusted, or is not locked.
            IsaNotUsable: a kernel needs features that are not usable here.
            ServiceFailed: the service refused the question.
        """
        locked = [self.locked.of(one) for one in question.alone]
        if None not in locked:
            return self._made(question, self._load(question, (), asking))
        request = self.requests.of_layer(question)
        # What is locked is not fetched by the answer: another client could not make do with it.
        digests = [one.artifact.sha256 for one in locked if one and one.artifact]
        name = self.requests.name(request, *digests)
        kept = self.cache.answer(name)
        if isinstance(asking, Session):
            try:
                document, given = self._ask(asking, question, request, kept)
                found = self._load(question, given, asking)
            except (ServiceUnreachable, QuestionNotKnown) as error:
                asking = error
            else:
                if not any(isinstance(one, NotFetched) for one in found):
                    self.cache.keep_answer(name, document)
                return self._made(question, found, given)
        return self._kept(question, kept, asking)

    def _ask(
        self, session: Session, question: LayerQuestion, request: dict[str, Any], kept: bytes | None
    ) -> tuple[bytes, list[_Given]]:
        """Return the answer for all problems of a layer, and what it says."""
        keys = self.belief.keys.at_first(session)
        document = session.resolve_batch(request)
        signers = [envelope.key_id for envelope in parse_envelopes(document)]
        keys = self.belief.keys.of_signers(session, keys, signers)
        given = self._open_all(document, question, keys)
        self.belief.ask_revocations(session)
        if kept is not None:
            self.belief.check_not_older(
                [verdict for verdict, _key_id in given],
                question.alone,
                lambda: parse_envelopes(kept),
            )
        return document, given

    def _kept(self, question: LayerQuestion, kept: bytes | None, asking: Asking) -> Layer:
        """Return the layer by the kept answer, if all of that can be had, or else without it."""
        if kept is not None:
            try:
                given = self._open_all(kept, question, self.belief.keys.kept())
                found = self._load(question, given, asking)
            except (KernelRejected, IsaNotUsable) as error:
                _LOG.info("The cached answer for a layer is not used: %s", error)
            else:
                if not any(isinstance(one, NotFetched) for one in found):
                    return self._made(question, found, given)
        return self._made(question, self._load(question, (), asking))

    def _open_all(self, document: bytes, question: LayerQuestion, keys: Keys) -> list[_Given]:
        """Return the verdicts in the answer for a layer, one for each of its problems."""
        envelopes = parse_envelopes(document)
        if len(envelopes) != len(question.problems):
            raise SignatureInvalid(
                f"the answer holds {len(envelopes)} verdicts for {len(question.problems)} "
                "problems; nothing was loaded: check the service."
            )
        return [
            (self.belief.open(envelope, one, keys), envelope.key_id)
            for envelope, one in zip(envelopes, question.alone, strict=True)
        ]

    def _load(
        self, question: LayerQuestion, given: Sequence[_Given], asking: Asking
    ) -> list[Kernel | NoKernel]:
        """Return the kernels that are locked or, for other problems, were given, or why not."""
        session = asking if isinstance(asking, Session) else None
        found: list[Kernel | NoKernel] = []
        answers: Iterable[_Given | None] = given or repeat(None)
        for one, answer in zip(question.alone, answers, strict=False):
            locked = self.locked.of(one)
            if locked is not None:
                found.append(self.locked.load(locked, one, asking))
            elif answer is not None:
                found.append(self.loader.kernel_or_none(answer[0], one, session))
            else:
                found.append(NotFetched(reason=str(asking)))
        return found

    def _made(
        self,
        question: LayerQuestion,
        found: Sequence[Kernel | NoKernel],
        given: Sequence[_Given] = (),
    ) -> Layer:
        """Return the layer of what was found, and note by what verdicts."""
        for one, (verdict, key_id) in zip(found, given, strict=False):
            if not isinstance(one, NotFetched):
                self.locked.note(verdict, key_id, of_layer=True)
        return make_layer(question.problems, found, threads=question.context.threads)
