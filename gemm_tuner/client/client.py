"""From a problem to a callable kernel: memory, cache directory, service, or NumPy with a reason."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from gemm_tuner.client.answer import Answer, parse_answer
from gemm_tuner.client.cache import Cache, default_cache_dir
from gemm_tuner.client.keys import KEYS_VARIABLE, Keys, configured_keys, keys_by_id, parse_keys
from gemm_tuner.client.transport import Transport
from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.canonical import identity
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.verdict import Basis
from gemm_tuner.errors import (
    InvalidSetting,
    ServiceUnreachable,
    SignatureInvalid,
    VerdictExpired,
)
from gemm_tuner.runtime.detect import detect_cpu
from gemm_tuner.runtime.fallback import FallbackKernel
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.store.wire import WireCpu
from gemm_tuner.trust.payload import VerdictPayload
from gemm_tuner.trust.verify import open_verdict

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """A verdict whose signature was checked, and the service's reasons for it."""

    verdict: VerdictPayload
    explain: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    problem: Problem
    context: ExecutionContext


class Client:
    """Asks one service for kernels, and keeps what it was given.

    The answers are signed. `public_keys` are the raw Ed25519 keys to believe; without them, those
    in the file that `GEMM_TUNER_KEYS` names, or, for a service on this machine, its own.

    One client can be used by any number of threads.
    """

    def __init__(
        self,
        url: str,
        *,
        public_keys: Iterable[bytes] | None = None,
        cache_dir: Path | None = None,
        cpu: Cpu | None = None,
    ) -> None:
        self._transport = Transport(url)
        self._pinned = configured_keys() if public_keys is None else keys_by_id(public_keys)
        self._cache = Cache(cache_dir or default_cache_dir())
        self._cpu = cpu or detect_cpu()
        self._kernels: dict[_Question, Kernel] = {}
        self._lock = Lock()

    def kernel(
        self, problem: Problem | str, *, threads: int = 1, regime: Regime | str = Regime.HOT
    ) -> Kernel | FallbackKernel:
        """Return the kernel for a problem, ready to pack weights and to be called.

        It comes from memory, the cache directory or the service, in this order. Where none is to
        be had, or the baseline is faster, a `FallbackKernel` says why in its `reason`.

        Args:
            problem: a problem, or its text such as `f32 128x3072x768 nk bias+gelu_erf`.
            threads: how many threads will share a call.
            regime: what is in the caches when it is called, `hot` or `cold_weights`.

        Raises:
            InvalidInput: the problem, threads or regime cannot be used.
            KernelRejected: an answer or a kernel cannot be trusted, or is for another ABI.
            IsaNotUsable: the kernel needs features that are not usable here.
            ServiceFailed: the service answered with an error.
        """
        question = _ask(problem, threads, regime)
        with self._lock:
            kernel = self._kernels.get(question) or self._cached_kernel(question)
            if kernel is None:
                try:
                    fetched = self._fetch_kernel(question)
                except ServiceUnreachable as error:
                    return FallbackKernel(problem=question.problem, reason=str(error))
                if isinstance(fetched, FallbackKernel):
                    return fetched
                kernel = fetched
            self._kernels[question] = kernel
            return kernel

    def resolve(
        self, problem: Problem | str, *, threads: int = 1, regime: Regime | str = Regime.HOT
    ) -> Resolution:
        """Return the verdict of the service, checked, with its reasons; nothing is loaded.

        Raises:
            ServiceUnreachable: the service does not answer.
            GemmTunerError: as in `kernel`.
        """
        answer, verdict = self._resolve(_ask(problem, threads, regime))
        return Resolution(verdict=verdict, explain=answer.explain)

    def _cached_kernel(self, question: _Question) -> Kernel | None:
        key = self._key(question)
        document = self._cache.answer(key)
        if document is None:
            return None
        try:
            keys = self._pinned or parse_keys(self._cache.answer(self._keys_name()) or b"")
            verdict = self._open(parse_answer(document), question, keys)
        except (SignatureInvalid, VerdictExpired) as error:
            _LOG.info("The cached answer for %s is dropped: %s", question.problem.text, error)
            self._cache.drop_answer(key)
            return None
        artifact = _artifact_of(verdict)
        binary = self._cache.artifact(artifact.sha256) if artifact else None
        if artifact is None or binary is None:
            return None
        return load_kernel(binary, artifact=artifact, cpu=self._cpu)

    def _fetch_kernel(self, question: _Question) -> Kernel | FallbackKernel:
        answer, verdict = self._resolve(question)
        artifact = _artifact_of(verdict)
        if artifact is None:
            return FallbackKernel(problem=question.problem, reason=_reason(verdict))
        binary = self._cache.artifact(artifact.sha256)
        if binary is None:
            binary = self._transport.artifact(artifact.sha256)
        kernel = load_kernel(binary, artifact=artifact, cpu=self._cpu)
        # Only what passed every check is kept, the answer last: it promises the artifact.
        self._cache.keep_artifact(artifact.sha256, binary)
        self._cache.keep_answer(self._key(question), answer.document)
        return kernel

    def _resolve(self, question: _Question) -> tuple[Answer, VerdictPayload]:
        keys = self._pinned or self._loopback_keys()
        answer = parse_answer(self._transport.resolve(self._request(question)))
        return answer, self._open(answer, question, keys)

    def _open(self, answer: Answer, question: _Question, keys: Keys) -> VerdictPayload:
        verdict = open_verdict(answer.envelope, keys, datetime.now(UTC))
        answered = (verdict.problem, verdict.threads, verdict.regime)
        context = question.context
        if answered != (question.problem.text, context.threads, context.regime):
            raise SignatureInvalid(
                f"the signed verdict is for {answered}, not for what was asked, "
                f"{question.problem.text!r}; nothing was loaded: check the service."
            )
        return verdict

    def _loopback_keys(self) -> Keys:
        """Return the keys of a service on this machine, and keep them for when it is away."""
        if not self._transport.is_loopback:
            raise SignatureInvalid(
                f"no public key of {self._transport.url} is pinned, so its answers cannot be "
                f"checked; save what its /v1/keys answers and name that file in {KEYS_VARIABLE}."
            )
        document = self._transport.keys()
        keys = parse_keys(document)
        self._cache.keep_answer(self._keys_name(), document)
        return keys

    def _request(self, question: _Question) -> dict[str, Any]:
        return {
            "problem": question.problem.text,
            "cpu": WireCpu.of(self._cpu).model_dump(mode="json"),
            "threads": question.context.threads,
            "regime": question.context.regime.value,
        }

    def _key(self, question: _Question) -> str:
        return identity([self._transport.url, self._request(question)])

    def _keys_name(self) -> str:
        return identity([self._transport.url, "keys"])


def _ask(problem: Problem | str, threads: int, regime: Regime | str) -> _Question:
    asked = Problem.parse(problem) if isinstance(problem, str) else problem
    regimes = Regime.parse_choice(regime)
    if len(regimes) != 1:
        raise InvalidSetting(f"regime {regime!r} names two; use 'hot' or 'cold_weights' here.")
    return _Question(problem=asked, context=ExecutionContext(threads=threads, regime=regimes[0]))


def _artifact_of(verdict: VerdictPayload) -> Artifact | None:
    return verdict.artifact.to_domain() if verdict.artifact else None


def _reason(verdict: VerdictPayload) -> str:
    if verdict.basis is Basis.NONE or verdict.ratio is None:
        return (
            f"nothing was tuned for {verdict.problem!r} on {verdict.cpu_key}; "
            'run "gemm-tuner sweep" on such a machine.'
        )
    return (
        f"the baseline is not beaten here: the best kernel for {verdict.problem!r} has "
        f"{verdict.ratio.median:.3f} times its speed."
    )
