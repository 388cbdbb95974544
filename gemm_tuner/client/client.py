"""From a problem to a callable kernel: memory, service, cache directory, or a library instead."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gemm_tuner.client.agreement import check_kernel, check_verdict
from gemm_tuner.client.answer import Answer, parse_answer, parse_envelopes
from gemm_tuner.client.cache import Cache, default_cache_dir
from gemm_tuner.client.keys import (
    KEYS_VARIABLE,
    Keys,
    KnownKeys,
    configured_keys,
    keys_by_id,
    parse_keys,
)
from gemm_tuner.client.once import Once
from gemm_tuner.client.transport import UNIX, Address, Session, connect
from gemm_tuner.domain.canonical import identity
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.reason import reason_for
from gemm_tuner.errors import (
    DigestMismatch,
    IsaNotUsable,
    KernelRejected,
    ServiceFailed,
    ServiceUnreachable,
    SignatureInvalid,
    StoreFailed,
)
from gemm_tuner.libraries.fallback import FallbackKernel, NoKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.layer import Layer, make_layer
from gemm_tuner.runtime.load import Kernel, load_kernel
from gemm_tuner.select.shared_weights import MAX_LOSS, layer_problems
from gemm_tuner.store.wire import WireCpu
from gemm_tuner.trust.local import default_socket_path
from gemm_tuner.trust.payload import VerdictPayload
from gemm_tuner.trust.signature import SignedVerdict, open_verdict

TIMEOUT_S = 10.0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _NotFetched(NoKernel):
    """Why a kernel that a verdict names could not be had this time."""


class Client:
    """Asks one service for kernels, and keeps what it was given for when the service is away.

    `url` is `http://host:8000`, or `unix:/path` for a Unix socket; without it, the socket of this
    user's own service on this machine. An ask takes at most `timeout_s`, downloads included.

    The answers are signed. `public_keys` are the raw Ed25519 keys to believe; without them, those
    in the file that `GEMM_TUNER_KEYS` names, or those that were remembered of this address: what a
    service on this machine showed at first, or what `gemm-tuner keys accept` was given.

    One client can be used by any number of threads; each question is asked once at a time.

    Raises:
        InvalidSetting: the address or the keys cannot be used.
        StoreFailed: the cache directory cannot be made, or others can write to it.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        public_keys: Iterable[bytes] | None = None,
        cache_dir: Path | None = None,
        cpu: Cpu | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._address = Address.parse(f"{UNIX}{default_socket_path()}" if url is None else url)
        self._timeout_s = timeout_s
        self._pinned = configured_keys() if public_keys is None else keys_by_id(public_keys)
        self._known_keys = KnownKeys()
        self._cache = Cache(cache_dir or default_cache_dir())
        self._cpu = cpu or detect_cpu()
        self._kernels = Once[_Question, Kernel | FallbackKernel](
            keeps=lambda kernel: isinstance(kernel, Kernel)
        )
        self._layers = Once[_LayerQuestion, Layer](
            keeps=lambda layer: all(isinstance(kernel, Kernel) for kernel in layer.kernels)
        )

    def kernel(
        self, problem: Problem | str, *, threads: int = 1, regime: Regime | str = Regime.HOT
    ) -> Kernel | FallbackKernel:
        """Return the kernel for a problem, ready to pack weights and to be called.

        It comes from memory, else from what the service answers now, else, when the service is
        away, from the cache directory. Where none is to be had, its download fails, or the baseline
        is faster, a `FallbackKernel` computes the same with that library, or with the best that can
        be called here, and says why in its `reason`.

        Args:
            problem: a problem, or its text such as `f32 128x3072x768 nk bias+gelu_erf`.
            threads: how many threads will share a call; the kernel then uses as many.
            regime: the state of the caches when it is called, `hot` or `cold_weights`.

        Raises:
            InvalidInput: the problem, threads or regime cannot be used.
            KernelRejected: an answer or a kernel cannot be trusted, or is for another ABI.
            IsaNotUsable: the kernel needs features that are not usable here.
            ServiceFailed: the service refused the question.
        """
        question = _ask(problem, threads, regime)
        return self._kernels.find(question, lambda: self._find_kernel(question))

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
            regime: the state of the caches when it is called, `hot` or `cold_weights`.
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
        return self._layers.find(question, lambda: self._find_layer(question))

    def resolve(
        self, problem: Problem | str, *, threads: int = 1, regime: Regime | str = Regime.HOT
    ) -> Resolution:
        """Return the verdict of the service, checked, with its reasons; nothing is loaded.

        Raises:
            ServiceUnreachable: the service does not answer, or cannot now.
            GemmTunerError: as in `kernel`.
        """
        with connect(self._address, self._timeout_s) as session:
            answer, verdict = self._resolve(session, _ask(problem, threads, regime), kept=None)
        return Resolution(verdict=verdict, explain=answer.explain)

    def _find_kernel(self, question: _Question) -> Kernel | FallbackKernel:
        kept = self._cache.answer(self._key(question))
        try:
            with connect(self._address, self._timeout_s) as session:
                return self._served_kernel(session, question, kept)
        except ServiceUnreachable as error:
            kernel = self._kept_kernel(question, kept) if kept is not None else None
            return kernel or _fallback(question, NoKernel(reason=str(error)))

    def _served_kernel(
        self, session: Session, question: _Question, kept: bytes | None
    ) -> Kernel | FallbackKernel:
        answer, verdict = self._resolve(session, question, kept)
        if kept is not None:
            self._check_not_older([verdict], [question], lambda: [parse_answer(kept).envelope])
        found = self._kernel_or_none(verdict, question, session)
        if isinstance(found, _NotFetched):
            return _fallback(question, found)
        # Only what passed every check is kept, the answer last: it promises the artifact.
        self._cache.keep_answer(self._key(question), answer.document)
        return found if isinstance(found, Kernel) else _fallback(question, found)

    def _kept_kernel(self, question: _Question, kept: bytes) -> Kernel | FallbackKernel | None:
        try:
            verdict = self._open(parse_answer(kept).envelope, question, self._kept_keys())
            found = self._kernel_or_none(verdict, question, None)
        except (KernelRejected, IsaNotUsable) as error:
            _LOG.info("The cached answer for %s is not used: %s", question.problem.text, error)
            return None
        if isinstance(found, _NotFetched):
            return None
        return found if isinstance(found, Kernel) else _fallback(question, found)

    def _find_layer(self, question: _LayerQuestion) -> Layer:
        request = self._layer_request(question)
        name = identity([self._address.url, request])
        kept = self._cache.answer(name)
        try:
            with connect(self._address, self._timeout_s) as session:
                keys = self._keys(session)
                document = session.resolve_batch(request)
                verdicts = self._open_all(document, question, keys)
                if kept is not None:
                    self._check_not_older(
                        [verdict for verdict, _one in verdicts],
                        [one for _verdict, one in verdicts],
                        lambda: parse_envelopes(kept),
                    )
                layer, is_whole = self._layer_of(verdicts, question, session)
        except ServiceUnreachable as error:
            return (kept and self._kept_layer(kept, question)) or make_layer(
                question.problems,
                [NoKernel(reason=str(error))] * len(question.problems),
                threads=question.context.threads,
            )
        if is_whole:
            self._cache.keep_answer(name, document)
        return layer

    def _kept_layer(self, kept: bytes, question: _LayerQuestion) -> Layer | None:
        try:
            verdicts = self._open_all(kept, question, self._kept_keys())
            layer, is_whole = self._layer_of(verdicts, question, None)
        except (KernelRejected, IsaNotUsable) as error:
            _LOG.info("The cached answer for a layer is not used: %s", error)
            return None
        return layer if is_whole else None

    def _open_all(
        self, document: bytes, question: _LayerQuestion, keys: Keys
    ) -> list[tuple[VerdictPayload, _Question]]:
        """Return the verdicts in the answer for a layer, each with the question it answers."""
        envelopes = parse_envelopes(document)
        if len(envelopes) != len(question.problems):
            raise SignatureInvalid(
                f"the answer holds {len(envelopes)} verdicts for {len(question.problems)} "
                "problems; nothing was loaded: check the service."
            )
        questions = [
            _Question(problem=problem, context=question.context) for problem in question.problems
        ]
        return [
            (self._open(envelope, one, keys), one)
            for envelope, one in zip(envelopes, questions, strict=True)
        ]

    def _layer_of(
        self,
        verdicts: Iterable[tuple[VerdictPayload, _Question]],
        question: _LayerQuestion,
        session: Session | None,
    ) -> tuple[Layer, bool]:
        """Return the layer, and whether every kernel that was named could be had."""
        found = [self._kernel_or_none(verdict, one, session) for verdict, one in verdicts]
        layer = make_layer(question.problems, found, threads=question.context.threads)
        return layer, not any(isinstance(one, _NotFetched) for one in found)

    def _check_not_older(
        self,
        verdicts: Iterable[VerdictPayload],
        questions: Iterable[_Question],
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
                known = self._open(envelope, question, self._kept_keys())
            except KernelRejected:
                continue  # it says nothing any more
            if verdict.age < known.age:
                raise ServiceUnreachable(
                    f"the service at {self._address.url} sent a verdict for "
                    f"{verdict.problem!r} that is older than the one kept here (issued "
                    f"{verdict.issued_at:%Y-%m-%d}, serial {verdict.serial}, after "
                    f"{known.issued_at:%Y-%m-%d}, serial {known.serial}); it is not used."
                )

    def _kernel_or_none(
        self, verdict: VerdictPayload, question: _Question, session: Session | None
    ) -> Kernel | NoKernel:
        """Return the kernel that a verdict names, from the cache or else the service, or why not.

        Raises:
            KernelRejected: what came cannot be trusted, or is for another ABI.
            IsaNotUsable: it needs features that are not usable here.
        """
        compared_with = verdict.compared_with.to_domain() if verdict.compared_with else None
        if verdict.artifact is None:
            return NoKernel(reason=_reason(verdict), compared_with=compared_with)
        artifact = verdict.artifact.to_domain()
        binary = self._cache.artifact(artifact.sha256)
        if binary is None and session is None:
            reason = f"kernel {artifact.sha256[:12]} is not in the cache."
            return _NotFetched(reason=reason, compared_with=compared_with)
        if binary is None:
            assert session is not None
            try:
                binary = session.artifact(artifact.sha256, artifact.size_bytes)
                artifact.check_digest(binary)
            except (ServiceFailed, DigestMismatch) as error:
                _LOG.warning("The kernel for %s was not had: %s", question.problem.text, error)
                return _NotFetched(reason=str(error), compared_with=compared_with)
        threads = question.context.threads
        kernel = load_kernel(
            binary, artifact=artifact, cpu=self._cpu, threads=threads, reason=_reason(verdict)
        )
        check_kernel(kernel, verdict, question.problem)
        self._cache.keep_artifact(artifact.sha256, binary)
        return kernel

    def _resolve(
        self, session: Session, question: _Question, kept: bytes | None
    ) -> tuple[Answer, VerdictPayload]:
        keys = self._keys(session)
        answer = parse_answer(session.resolve(self._request(question), kept))
        return answer, self._open(answer.envelope, question, keys)

    def _open(self, envelope: SignedVerdict, question: _Question, keys: Keys) -> VerdictPayload:
        if self._pinned is None and keys and envelope.key_id not in keys:
            raise SignatureInvalid(
                f"the answer of {self._address.url} is signed with the key {envelope.key_id}, but "
                f"{', '.join(keys)} was remembered of it: someone else may answer there, and "
                "nothing was loaded. If the service was given a new key, run: "
                f"gemm-tuner keys accept {self._address.url} {envelope.key_id}"
            )
        verdict = open_verdict(envelope, keys, datetime.now(UTC))
        check_verdict(
            verdict,
            problem=question.problem,
            cpu_key=self._cpu.exact_key,
            context=question.context,
        )
        return verdict

    def _keys(self, session: Session) -> Keys:
        """Return the keys to believe; those of a service on this machine are remembered at first.

        Raises:
            SignatureInvalid: none is known of a service elsewhere.
            StoreFailed: a key of a port, which anyone here can hold, cannot be remembered.
        """
        known = self._kept_keys()
        if known:
            return known
        if not self._address.is_local:
            raise SignatureInvalid(
                f"no public key of {self._address.url} is known, so its answers cannot be "
                f"checked; run: gemm-tuner keys accept {self._address.url}, and compare the key id "
                f"with the service's, or name a file of its keys in {KEYS_VARIABLE}."
            )
        shown = parse_keys(session.keys())
        try:
            return self._known_keys.remember(self._address.url, shown)
        except StoreFailed as error:
            if self._address.socket is None:
                raise
            # The peer's uid is this user's: the key need not be remembered to be believed.
            _LOG.warning("%s", error)
            return shown

    def _kept_keys(self) -> Keys:
        if self._pinned is not None:
            return self._pinned
        return self._known_keys.of(self._address.url) or {}

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
        return identity([self._address.url, self._request(question)])


def _ask(problem: Problem | str, threads: int, regime: Regime | str) -> _Question:
    asked = Problem.parse(problem) if isinstance(problem, str) else problem
    asked.check_work()
    context = ExecutionContext(threads=threads, regime=Regime.parse_one(regime))
    return _Question(problem=asked, context=context)


def _fallback(question: _Question, found: NoKernel) -> FallbackKernel:
    return FallbackKernel(
        problem=question.problem,
        reason=found.reason,
        threads=question.context.threads,
        compared_with=found.compared_with,
    )


def _reason(verdict: VerdictPayload) -> str:
    return reason_for(
        verdict.problem,
        verdict.cpu_key,
        decision=verdict.decision,
        basis=verdict.basis,
        ratio=verdict.ratio.to_domain() if verdict.ratio else None,
        is_served=verdict.artifact is not None,
    )
