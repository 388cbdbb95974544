"""From a problem to a callable kernel: memory, service, cache directory, or a library instead."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from gemm_tuner.client.agreement import check_kernel, check_verdict
from gemm_tuner.client.answer import Answer, parse_answer, parse_envelopes
from gemm_tuner.client.cache import Cache, default_cache_dir
from gemm_tuner.client.keys import KEYS_VARIABLE, Keys, configured_keys, keys_by_id, parse_keys
from gemm_tuner.client.transport import Transport
from gemm_tuner.domain.canonical import identity
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.verdict import Basis
from gemm_tuner.errors import (
    IsaNotUsable,
    KernelRejected,
    ServiceUnreachable,
    SignatureInvalid,
)
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.layer import Layer, make_layer
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.select.shared_weights import MAX_LOSS, layer_problems
from gemm_tuner.store.wire import WireCpu
from gemm_tuner.trust.payload import SignedArtifact, VerdictPayload
from gemm_tuner.trust.signature import SignedVerdict, open_verdict

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerQuestion:
    problems: tuple[Problem, ...]
    context: ExecutionContext
    max_loss: float


class Client:
    """Asks one service for kernels, and keeps what it was given for when the service is away.

    The answers are signed. `public_keys` are the raw Ed25519 keys to believe; without them, those
    in the file that `GEMM_TUNER_KEYS` names, or, for a service on this machine, its own.

    One client can be used by any number of threads.

    Raises:
        InvalidSetting: the address or the keys cannot be used.
        StoreFailed: the cache directory cannot be made, or others can write to it.
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
        self._layers: dict[_LayerQuestion, Layer] = {}
        self._lock = Lock()

    def kernel(
        self, problem: Problem | str, *, threads: int = 1, regime: Regime | str = Regime.HOT
    ) -> Kernel | FallbackKernel:
        """Return the kernel for a problem, ready to pack weights and to be called.

        It comes from memory, else from what the service answers now, else, when the service is
        away, from the cache directory. Where none is to be had, or the baseline is faster, a
        `FallbackKernel` computes the same with oneDNN, or else NumPy, and says why in its `reason`.

        Args:
            problem: a problem, or its text such as `f32 128x3072x768 nk bias+gelu_erf`.
            threads: how many threads will share a call; the kernel then uses as many.
            regime: what is in the caches when it is called, `hot` or `cold_weights`.

        Raises:
            InvalidInput: the problem, threads or regime cannot be used.
            KernelRejected: an answer or a kernel cannot be trusted, or is for another ABI.
            IsaNotUsable: the kernel needs features that are not usable here.
            ServiceFailed: the service refused the question.
        """
        question = _ask(problem, threads, regime)
        known = self._kernels.get(question)
        if known is not None:
            return known
        # Held while the service is asked: those who wait want the same kernel, or also the service.
        with self._lock:
            kernel = self._kernels.get(question) or self._find_kernel(question)
            if isinstance(kernel, Kernel):
                self._kernels[question] = kernel
            return kernel

    def layer(
        self,
        n: int,
        k: int,
        *,
        m: Iterable[int | str],
        dtype: str = "f32",
        epilogue: str = "none",
        w_layout: str = "nk",
        threads: int = 1,
        regime: Regime | str = Regime.HOT,
        max_loss: float = MAX_LOSS,
    ) -> Layer:
        """Return a layer for several m, whose kernels read as few packed copies as they can.

        The kernels come from where `kernel` takes them. For those m that have none, one library
        computes.

        Args:
            n: columns of y.
            k: columns of x.
            m: the numbers of rows, or ranges such as `"17..64"`. Others are made up of these.
            dtype: types such as `f32` or `bf16_bf16_f32_f32`.
            epilogue: steps such as `bias+gelu_erf`.
            w_layout: `nk` or `kn`, with groups `nk:g128`.
            threads: how many threads will share a call.
            regime: what is in the caches when it is called, `hot` or `cold_weights`.
            max_loss: the share of its speed that each m may lose so that weights are shared.

        Raises:
            InvalidInput: an argument cannot be used.
            GemmTunerError: as in `kernel`.
        """
        question = _LayerQuestion(
            problems=layer_problems(
                n, k, m=m, dtype=dtype, epilogue=epilogue, w_layout=w_layout, max_loss=max_loss
            ),
            context=ExecutionContext(threads=threads, regime=Regime.parse_one(regime)),
            max_loss=max_loss,
        )
        with self._lock:
            layer = self._layers.get(question) or self._find_layer(question)
            if all(isinstance(kernel, Kernel) for kernel in layer.kernels):
                self._layers[question] = layer
            return layer

    def resolve(
        self, problem: Problem | str, *, threads: int = 1, regime: Regime | str = Regime.HOT
    ) -> Resolution:
        """Return the verdict of the service, checked, with its reasons; nothing is loaded.

        Raises:
            ServiceUnreachable: the service does not answer, or cannot now.
            GemmTunerError: as in `kernel`.
        """
        answer, verdict = self._resolve(_ask(problem, threads, regime), kept=None)
        return Resolution(verdict=verdict, explain=answer.explain)

    def _find_kernel(self, question: _Question) -> Kernel | FallbackKernel:
        kept = self._cache.answer(self._key(question))
        try:
            return self._served_kernel(question, kept)
        except ServiceUnreachable as error:
            kernel = self._kept_kernel(question, kept) if kept is not None else None
            return kernel or _fallback(question, str(error))

    def _served_kernel(self, question: _Question, kept: bytes | None) -> Kernel | FallbackKernel:
        answer, verdict = self._resolve(question, kept)
        if verdict.artifact is None:
            kernel: Kernel | FallbackKernel = _fallback(question, _reason(verdict))
        else:
            kernel = self._kernel_of(verdict, verdict.artifact, question, may_fetch=True)
        # Only what passed every check is kept, the answer last: it promises the artifact.
        self._cache.keep_answer(self._key(question), answer.document)
        return kernel

    def _kept_kernel(self, question: _Question, kept: bytes) -> Kernel | FallbackKernel | None:
        try:
            verdict = self._open(parse_answer(kept).envelope, question, self._kept_keys())
            if verdict.artifact is None:
                return _fallback(question, _reason(verdict))
            return self._kernel_of(verdict, verdict.artifact, question, may_fetch=False)
        except (KernelRejected, IsaNotUsable) as error:
            _LOG.info("The cached answer for %s is not used: %s", question.problem.text, error)
            return None

    def _find_layer(self, question: _LayerQuestion) -> Layer:
        request = self._layer_request(question)
        name = identity([self._transport.url, request])
        try:
            keys = self._loopback_keys() if self._pinned is None else self._pinned
            document = self._transport.resolve_batch(request)
            layer = self._open_layer(document, question, keys, may_fetch=True)
        except ServiceUnreachable as error:
            kept = self._cache.answer(name)
            return (kept and self._kept_layer(kept, question)) or make_layer(
                question.problems,
                [str(error)] * len(question.problems),
                threads=question.context.threads,
            )
        self._cache.keep_answer(name, document)
        return layer

    def _kept_layer(self, kept: bytes, question: _LayerQuestion) -> Layer | None:
        try:
            return self._open_layer(kept, question, self._kept_keys(), may_fetch=False)
        except (KernelRejected, IsaNotUsable) as error:
            _LOG.info("The cached answer for a layer is not used: %s", error)
            return None

    def _open_layer(
        self, document: bytes, question: _LayerQuestion, keys: Keys, *, may_fetch: bool
    ) -> Layer:
        envelopes = parse_envelopes(document)
        if len(envelopes) != len(question.problems):
            raise SignatureInvalid(
                f"the answer holds {len(envelopes)} verdicts for {len(question.problems)} "
                "problems; nothing was loaded: check the service."
            )
        found: list[Kernel | str] = []
        for problem, envelope in zip(question.problems, envelopes, strict=True):
            one = _Question(problem=problem, context=question.context)
            verdict = self._open(envelope, one, keys)
            found.append(
                _reason(verdict)
                if verdict.artifact is None
                else self._kernel_of(verdict, verdict.artifact, one, may_fetch=may_fetch)
            )
        return make_layer(question.problems, found, threads=question.context.threads)

    def _kernel_of(
        self,
        verdict: VerdictPayload,
        signed: SignedArtifact,
        question: _Question,
        *,
        may_fetch: bool,
    ) -> Kernel:
        """Return the kernel that a verdict names, from the cache or else the service.

        Raises:
            KernelRejected: it is not in the cache, and may not be fetched.
            GemmTunerError: as in `kernel`.
        """
        artifact = signed.to_domain()
        binary = self._cache.artifact(artifact.sha256)
        if binary is None and not may_fetch:
            raise KernelRejected(
                f"kernel {artifact.sha256[:12]} is not in the cache; ask when the service is there."
            )
        if binary is None:
            binary = self._transport.artifact(artifact.sha256, artifact.size_bytes)
        threads = question.context.threads
        kernel = load_kernel(binary, artifact=artifact, cpu=self._cpu, threads=threads)
        check_kernel(kernel, verdict, question.problem)
        self._cache.keep_artifact(artifact.sha256, binary)
        return kernel

    def _resolve(self, question: _Question, kept: bytes | None) -> tuple[Answer, VerdictPayload]:
        keys = self._loopback_keys() if self._pinned is None else self._pinned
        answer = parse_answer(self._transport.resolve(self._request(question), kept))
        return answer, self._open(answer.envelope, question, keys)

    def _open(self, envelope: SignedVerdict, question: _Question, keys: Keys) -> VerdictPayload:
        verdict = open_verdict(envelope, keys, datetime.now(UTC))
        check_verdict(
            verdict,
            problem=question.problem,
            cpu_key=self._cpu.exact_key,
            context=question.context,
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

    def _kept_keys(self) -> Keys:
        if self._pinned is not None:
            return self._pinned
        return parse_keys(self._cache.answer(self._keys_name()) or b"")

    def _request(self, question: _Question) -> dict[str, Any]:
        return {"problem": question.problem.text, **self._where(question.context)}

    def _layer_request(self, question: _LayerQuestion) -> dict[str, Any]:
        return {
            "problems": [problem.text for problem in question.problems],
            "max_loss": question.max_loss,
            **self._where(question.context),
        }

    def _where(self, context: ExecutionContext) -> dict[str, Any]:
        return {
            "cpu": WireCpu.of(self._cpu).model_dump(mode="json"),
            "threads": context.threads,
            "regime": context.regime.value,
        }

    def _key(self, question: _Question) -> str:
        return identity([self._transport.url, self._request(question)])

    def _keys_name(self) -> str:
        return identity([self._transport.url, "keys"])


def _ask(problem: Problem | str, threads: int, regime: Regime | str) -> _Question:
    asked = Problem.parse(problem) if isinstance(problem, str) else problem
    asked.check_work()
    context = ExecutionContext(threads=threads, regime=Regime.parse_one(regime))
    return _Question(problem=asked, context=context)


def _fallback(question: _Question, reason: str) -> FallbackKernel:
    return FallbackKernel(problem=question.problem, reason=reason, threads=question.context.threads)


def _reason(verdict: VerdictPayload) -> str:
    if verdict.basis is Basis.NONE or verdict.ratio is None:
        return (
            f"nothing was tuned for {verdict.problem!r} on {verdict.cpu_key}; "
            'run "gemm-tuner sweep" on such a machine.'
        )
    return (
        f"no kernel is shown to be as fast as the baseline: the best for {verdict.problem!r} has "
        f"{verdict.ratio.median:.3f} times its speed."
    )
