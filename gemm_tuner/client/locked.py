"""The kernels that a lock file names: loaded whatever the service says now, unless revoked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gemm_tuner.client.belief import Belief
from gemm_tuner.client.cache import Cache
from gemm_tuner.client.loading import Loader
from gemm_tuner.client.lock import LOCK_FILE, LockedKernel, Place, not_locked, read_lock
from gemm_tuner.client.question import NotFetched, Question
from gemm_tuner.client.transport import Asking, Session
from gemm_tuner.errors import NotLocked, ServiceUnreachable
from gemm_tuner.libraries.fallback import NoKernel
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.trust.payload import VerdictPayload


@dataclass(frozen=True, kw_only=True)
class Locked:
    """What a lock file names, and what another would: `given`, all that its client was given."""

    path: Path
    kernels: Mapping[Place, LockedKernel]
    is_frozen: bool
    belief: Belief
    cache: Cache
    loader: Loader
    given: dict[Place, LockedKernel] = field(default_factory=dict)

    @classmethod
    def read(
        cls, path: Path | None, *, is_frozen: bool, belief: Belief, cache: Cache, loader: Loader
    ) -> "Locked":
        """Return what a file locks; without one nothing, unless nothing else may be used.

        Raises:
            InvalidSetting: it is no lock file of this version.
        """
        chosen = path or LOCK_FILE
        return cls(
            path=chosen,
            kernels=read_lock(chosen) if path or is_frozen else {},
            is_frozen=is_frozen,
            belief=belief,
            cache=cache,
            loader=loader,
        )

    def of(self, question: Question) -> LockedKernel | None:
        """Return what is locked for a question.

        Raises:
            NotLocked: it is nothing, and nothing else may be used.
        """
        context = question.context
        cpu_key = self.belief.cpu_key
        place = (question.problem.text, cpu_key, context.threads, context.regime.value)
        locked = self.kernels.get(place)
        if locked is None and self.is_frozen:
            raise not_locked(self.path, place)
        return locked

    def load(self, locked: LockedKernel, question: Question, asking: Asking) -> Kernel | NoKernel:
        """Return the kernel that is locked for a question, or why there is none.

        Raises:
            NotLocked: it cannot be had, and nothing else may be used.
            SignatureInvalid: the key that signed it was revoked.
        """
        self.belief.learn_revocations(asking if isinstance(asking, Session) else None)
        self.belief.revocations.check_key(locked.key_id, self.belief.address.url)
        self.given[locked.place] = locked
        # What is cached needs no answer, so none is withheld, however old the list.
        is_here = locked.artifact is None or self.cache.artifact(locked.artifact.sha256)
        session = asking if isinstance(asking, Session) and not is_here else None
        found = self.loader.kernel_or_none(locked.verdict(), question, session)
        if isinstance(found, NotFetched) and isinstance(asking, ServiceUnreachable):
            found = replace(found, reason=f"{found.reason} {asking}")
        if isinstance(found, NotFetched) and self.is_frozen:
            raise NotLocked(
                f"the kernel that {self.path} names for {question.problem.text!r} cannot be had: "
                f"{found.reason}"
            )
        return found

    def note(self, verdict: VerdictPayload, key_id: str, *, of_layer: bool = False) -> None:
        """Note what the client was given; what it was given for a problem alone counts first."""
        locked = LockedKernel.of(verdict, key_id)
        if of_layer:
            self.given.setdefault(locked.place, locked)
        else:
            self.given[locked.place] = locked
