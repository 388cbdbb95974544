"""From a verdict that was checked to its kernel: out of the cache, or else downloaded once."""

import logging
from weakref import WeakKeyDictionary

from gemm_tuner.client.agreement import check_kernel
from gemm_tuner.client.cache import Cache
from gemm_tuner.client.question import NotDownloaded, NotFetched, Question, reason_of
from gemm_tuner.client.revocations import KnownRevocations
from gemm_tuner.client.transport import Session
from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.tunable import is_tunable
from gemm_tuner.errors import DigestMismatch, ServiceFailed
from gemm_tuner.libraries.fallback import NoKernel
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.trust.payload import VerdictPayload

_LONGEST_WAIT_S = 5.0

_LOG = logging.getLogger(__name__)


class Loader:
    """Loads kernels for one CPU, and knows until when their verdicts hold."""

    def __init__(self, cache: Cache, revocations: KnownRevocations, cpu: Cpu) -> None:
        self._cache = cache
        self._revocations = revocations
        self._cpu = cpu
        self._verdicts = WeakKeyDictionary[Kernel, VerdictPayload]()

    def holds(self, kernel: Kernel) -> bool:
        """Return whether a loaded kernel was not revoked since, and its verdict has not expired."""
        is_revoked = self._revocations.why_revoked(kernel.artifact.sha256) is not None
        return not is_revoked and self._revocations.now() < self._verdicts[kernel].expires_at

    def is_tunable(self, kernel: Kernel) -> bool:
        """Return whether a loaded kernel was chosen without a measurement for its question."""
        return is_tunable(self._verdicts[kernel].basis, None)

    def kernel_or_none(
        self, verdict: VerdictPayload, question: Question, session: Session | None
    ) -> Kernel | NoKernel:
        """Return the kernel that a verdict names, from the cache or else the service, or why not.

        Raises:
            KernelRejected: what came cannot be trusted, or is for another ABI.
            IsaNotUsable: it needs features that are not usable here.
        """
        comparison = verdict.comparison
        if verdict.artifact is None:
            return NoKernel.of(reason_of(verdict), comparison)
        artifact = verdict.artifact.to_domain()
        if revoked := self._revocations.why_not_loaded(artifact.sha256, is_online=bool(session)):
            _LOG.warning("The kernel for %s is not used: %s", question.problem.text, revoked)
            return NotFetched.of(revoked, comparison)
        binary = self._cache.artifact(artifact.sha256)
        if binary is not None:
            return self._load(binary, artifact, verdict, question)
        if session is None:
            reason = f"kernel {artifact.sha256[:12]} is not in the cache."
            return NotFetched.of(reason, comparison)
        # Of many processes that start together, one downloads.
        with self._cache.fetching(artifact.sha256, min(_LONGEST_WAIT_S, session.rest_s() / 2)):
            binary = self._cache.artifact(artifact.sha256)
            if binary is None:
                return self._downloaded(session, artifact, verdict, question)
        return self._load(binary, artifact, verdict, question)

    def _downloaded(
        self, session: Session, artifact: Artifact, verdict: VerdictPayload, question: Question
    ) -> Kernel | NoKernel:
        try:
            binary = session.artifact(artifact.sha256, artifact.size_bytes)
            artifact.check_digest(binary)
        except (ServiceFailed, DigestMismatch) as error:
            _LOG.warning("The kernel for %s was not had: %s", question.problem.text, error)
            return NotDownloaded.of(str(error), verdict.comparison)
        kernel = self._load(binary, artifact, verdict, question)
        self._cache.keep_artifact(artifact.sha256, binary)
        return kernel

    def _load(
        self, binary: bytes, artifact: Artifact, verdict: VerdictPayload, question: Question
    ) -> Kernel:
        threads = question.context.threads
        kernel = load_kernel(
            binary,
            artifact=artifact,
            cpu=self._cpu,
            threads=threads,
            reason=reason_of(verdict),
            comparison=verdict.comparison,
        )
        check_kernel(kernel, verdict, question.problem)
        # Not by its digest: another question may have the same kernel, by a verdict of its own.
        self._verdicts[kernel] = verdict
        return kernel
