"""Whom a client believes: the keys of a service, its revocations, and verdicts that are not old."""

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from gemm_tuner.client.agreement import check_verdict
from gemm_tuner.client.keys import Keys
from gemm_tuner.client.question import Question
from gemm_tuner.client.revocations import KnownRevocations
from gemm_tuner.client.transport import Address, Session
from gemm_tuner.client.trusted_keys import BelievedKeys
from gemm_tuner.errors import (
    KernelRejected,
    ServiceFailed,
    ServiceUnreachable,
    SignatureInvalid,
    StoreFailed,
)
from gemm_tuner.trust.payload import VerdictPayload
from gemm_tuner.trust.signature import SignedVerdict, open_verdict

_REVOCATIONS_TIMEOUT_S = 1.0  # beside a kernel that is there already

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """What is believed of the service at one address, for one CPU."""

    address: Address
    cpu_key: str
    keys: BelievedKeys
    revocations: KnownRevocations

    def open_new(
        self, envelope: SignedVerdict, question: Question, session: Session
    ) -> VerdictPayload:
        """Return a verdict as `open` does, by keys that the session may have to ask for.

        Raises:
            KernelRejected: it is not signed by one to be believed, or has expired.
        """
        keys = self.keys.at_first(session)
        keys = self.keys.of_signers(session, keys, [envelope.key_id])
        return self.open(envelope, question, keys)

    def open(self, envelope: SignedVerdict, question: Question, keys: Keys) -> VerdictPayload:
        """Return a verdict that is signed by one of `keys`, and answers the question.

        Raises:
            KernelRejected: it is not, or has expired.
        """
        self.keys.check(envelope.key_id, keys)
        verdict = open_verdict(envelope, keys, self.revocations.now())
        check_verdict(
            verdict,
            problem=question.problem,
            cpu_key=self.cpu_key,
            context=question.context,
        )
        return verdict

    def ask_revocations(self, session: Session) -> None:
        """Ask for the list of revocations, if it is time to.

        It is believed by a key as an answer is, a succeeding one too: who has a lock file may ask
        for nothing else.
        """

        def keys_for(key_id: str) -> Keys:
            return self.keys.of_signers(session, self.keys.at_first(session), [key_id])

        self.revocations.ask(session.revocations, keys_for, longest_wait_s=session.rest_s())

    def learn_revocations(self, session: Session | None) -> None:
        """Ask for the list of revocations for a short while, if it is time to.

        Without a session, what another process was given is learnt. What goes wrong costs nothing.
        """
        if self.revocations.is_due() and session is not None:
            with suppress(ServiceFailed, SignatureInvalid, StoreFailed):
                self.ask_revocations(session.within(_REVOCATIONS_TIMEOUT_S))

    def check_not_older(
        self,
        verdicts: Iterable[VerdictPayload],
        questions: Iterable[Question],
        kept: Callable[[], Iterable[SignedVerdict]],
    ) -> None:
        """Check that verdicts are not older than those kept for the same questions.

        Otherwise someone between client and service could bring back a kernel that was found wrong
        since, or the service could, from before its database was restored.

        Raises:
            ServiceUnreachable: one is older; the kept ones serve better.
        """
        try:
            envelopes = kept()
        except KernelRejected:
            return  # damaged: it says nothing
        for verdict, question, envelope in zip(verdicts, questions, envelopes, strict=False):
            try:
                known = self.open(envelope, question, self.keys.kept())
            except KernelRejected:
                continue  # it says nothing any more
            if verdict.age < known.age:
                raise ServiceUnreachable(
                    f"the service at {self.address.url} sent a verdict for "
                    f"{verdict.problem!r} that is older than the one kept here (issued "
                    f"{verdict.issued_at:%Y-%m-%d}, serial {verdict.serial}, after "
                    f"{known.issued_at:%Y-%m-%d}, serial {known.serial}); it is not used."
                )
