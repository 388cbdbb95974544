"""From a problem to a callable kernel: memory, service, cache directory, or a library instead."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gemm_tuner.client.answer import Answer, parse_answer, parse_answers, parse_envelopes
from gemm_tuner.client.belief import Belief
from gemm_tuner.client.believed import BelievedKeys
from gemm_tuner.client.cache import Cache, default_cache_dir
from gemm_tuner.client.keys import Keys, configured_keys, keys_by_id
from gemm_tuner.client.loading import Loader
from gemm_tuner.client.lock import LOCK_FILE, LockedKernel, Place, not_locked, read_lock, write_lock
from gemm_tuner.client.once import Once
from gemm_tuner.client.question import (
    LayerQuestion,
    NotFetched,
    Question,
    Resolution,
    ask,
    fallback,
    is_set,
)
from gemm_tuner.client.revocations import KnownRevocations
from gemm_tuner.client.transport import MAX_CONNECTIONS, UNIX, Address, Connections, Session
from gemm_tuner.domain.canonical import identity
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import (
    IsaNotUsable,
    KernelRejected,
    NotLocked,
    ServiceFailed,
    ServiceUnreachable,
    SignatureInvalid,
    StoreFailed,
)
from gemm_tuner.libraries.fallback import FallbackKernel, NoKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.layer import Layer, make_layer
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.select.shared_weights import MAX_LOSS, layer_problems
from gemm_tuner.store.wire import WireCpu
from gemm_tuner.trust.local import default_socket_path
from gemm_tuner.trust.payload import VerdictPayload
from gemm_tuner.trust.signature import SignedVerdict

TIMEOUT_S = 10.0
_REVOCATIONS_TIMEOUT_S = 1.0  # for a kernel that is in memory
NOT_SERVED_S = 10.0
MAX_BATCH = 1000

_LOG = logging.getLogger(__name__)


class Client:
    """Asks one service for kernels, and keeps what it was given for when the service is away.

    `url` is `http://host:8000`, or `unix:/path` for a Unix socket; without it, the socket of this
    user's own service on this machine. An ask takes at most `timeout_s`, downloads included.

    The answers are signed. `public_keys` are the raw Ed25519 keys to believe; without them, those
    in the file that `GEMM_TUNER_KEYS` names, or those that were remembered of this address: what a
    service on this machine showed at first, or what `gemm-tuner keys accept` was given.

    A service on another machine wants a `token`, by default that in `GEMM_TUNER_TOKEN`; it is sent
    by https only.

    A problem gets what a `lock` file names, whatever the service says now. One that it does not
    name is asked for, or, if `frozen`, an error; the file is then by default `gemm-tuner.lock`. If
    `offline`, nothing is sent. Both are by default `GEMM_TUNER_FROZEN` and `GEMM_TUNER_OFFLINE`.

    One client can be used by any number of threads; each question is asked once at a time.

    Raises:
        InvalidSetting: the address, the keys or the token cannot be used.
        StoreFailed: others can write to the cache directory.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        public_keys: Iterable[bytes] | None = None,
        cache_dir: Path | None = None,
        cpu: Cpu | None = None,
        timeout_s: float = TIMEOUT_S,
        token: str | None = None,
        lock: Path | None = None,
        frozen: bool | None = None,
        offline: bool | None = None,
    ) -> None:
        address = Address.parse(f"{UNIX}{default_socket_path()}" if url is None else url)
        self._address = address.with_token(token)
        self._connections = Connections(self._address)
        self._frozen = is_set("GEMM_TUNER_FROZEN") if frozen is None else frozen
        self._offline = is_set("GEMM_TUNER_OFFLINE") if offline is None else offline
        self._lock_path = lock or LOCK_FILE
        self._locked = read_lock(self._lock_path) if lock or self._frozen else {}
        self._given: dict[Place, LockedKernel] = {}
        self._timeout_s = timeout_s
        self._cache = Cache(cache_dir or default_cache_dir())
        self._cpu = cpu or detect_cpu()
        pinned = configured_keys() if public_keys is None else keys_by_id(public_keys)
        revocations = KnownRevocations(self._cache, identity(self._address.url))
        self._belief = Belief(
            address=self._address,
            cpu_key=self._cpu.exact_key,
            keys=BelievedKeys(self._address, pinned, revocations),
            revocations=revocations,
        )
        self._loader = Loader(self._cache, self._belief.revocations, self._cpu)
        self._kernels = Once[Question, Kernel | FallbackKernel](
            lambda kernel: isinstance(kernel, Kernel),
            holds=lambda kernel: self._still_hold([kernel]),
            brief_s=NOT_SERVED_S,
        )
        self._layers = Once[LayerQuestion, Layer](
            lambda layer: all(isinstance(kernel, Kernel) for kernel in layer.kernels),
            holds=lambda layer: self._still_hold(layer.kernels),
            brief_s=NOT_SERVED_S,
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
        question = ask(problem, threads, regime)
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
        question = LayerQuestion(
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
        question = ask(problem, threads, regime)
        answer, verdict = self._resolve(self._session(), question, kept=None)
        return Resolution(verdict=verdict, explain=answer.explain)

    def ask_anew(self) -> None:
        """Forget which problems have no kernel, and that the service was away.

        Otherwise nothing is asked for 10 s of such a problem, and of such a service for 5 s.
        """
        self._kernels.forget_brief()
        self._layers.forget_brief()
        self._connections.forget_absence()

    def kernels(
        self,
        problems: Iterable[Problem | str],
        *,
        threads: int = 1,
        regime: Regime | str = Regime.HOT,
    ) -> list[Kernel | FallbackKernel]:
        """Return the kernels for many problems, such as all layers of a model, in their order.

        They are those that `kernel` returns one by one, but are asked for at once, and downloaded
        side by side. All of it takes at most `timeout_s`.

        Raises:
            GemmTunerError: as in `kernel`.
        """
        questions = [ask(problem, threads, regime) for problem in problems]
        missing = [one for one in dict.fromkeys(questions) if self._kernels.known(one) is None]
        look = self._look_in_batch([one for one in missing if self._lock_of(one) is None])

        def find(question: Question) -> Kernel | FallbackKernel:
            return self._kernels.find(question, lambda: look(question))

        with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
            found = dict(zip(missing, pool.map(find, missing), strict=True))
        return [found.get(one) or find(one) for one in questions]

    @property
    def given(self) -> Mapping[Place, LockedKernel]:
        """Return the answers that this client was given or has locked, as a lock file has them."""
        return MappingProxyType(self._given)

    def write_lock(self, path: Path = LOCK_FILE) -> None:
        """Write a lock file of what this client was given for the problems that it asked for.

        Raises:
            StoreFailed: it cannot be written.
        """
        write_lock(path, self._given.values())

    def _look_in_batch(
        self, questions: Sequence[Question]
    ) -> Callable[[Question], Kernel | FallbackKernel]:
        """Ask for all of `questions`, and return what finds the kernel for each."""
        try:
            session = self._session()
            answers: dict[Question, Answer] = {}
            for start in range(0, len(questions), MAX_BATCH):
                batch = questions[start : start + MAX_BATCH]
                self._belief.keys.at_first(session)
                document = session.resolve_batch(
                    self._batch_request([one.problem for one in batch], batch[0].context)
                )
                # What met an error of its own is asked alone, and then tells it.
                found = zip(batch, parse_answers(document, len(batch)), strict=True)
                answers |= {one: answer for one, answer in found if answer is not None}
        except ServiceUnreachable as error:
            why_away = str(error)
            return lambda one: self._find_kernel(one, why_away=why_away)
        return lambda one: self._find_kernel(one, session=session, answer=answers.get(one))

    def _lock_of(self, question: Question) -> LockedKernel | None:
        """Return what is locked for a question; nothing is an error if `frozen`."""
        context = question.context
        place = (question.problem.text, self._cpu.exact_key, context.threads, context.regime.value)
        locked = self._locked.get(place)
        if locked is None and self._frozen:
            raise not_locked(self._lock_path, place)
        return locked

    def _locked_kernel(self, locked: LockedKernel, question: Question) -> Kernel | FallbackKernel:
        found = self._locked_or_none(locked, question)
        if isinstance(found, NotFetched) and self._frozen:
            raise NotLocked(
                f"the kernel that {self._lock_path} names for {question.problem.text!r} cannot be "
                f"had: {found.reason}"
            )
        return found if isinstance(found, Kernel) else fallback(question, found)

    def _locked_or_none(self, locked: LockedKernel, question: Question) -> Kernel | NoKernel:
        self._learn_revocations()
        self._belief.revocations.check_key(locked.key_id, self._address.url)
        self._given[locked.place] = locked
        # What is cached needs no answer, so none is withheld, however old the list.
        is_here = locked.artifact is None or self._cache.artifact(locked.artifact.sha256)
        session = None if self._offline or is_here else self._connections.session(self._timeout_s)
        return self._loader.kernel_or_none(locked.verdict(), question, session)

    def _session(self) -> Session:
        if self._offline:
            raise ServiceUnreachable(
                f"the service at {self._address.url} is not asked, because this client is offline; "
                "unset GEMM_TUNER_OFFLINE, or give offline=False."
            )
        self._connections.check_presence()
        return self._connections.session(self._timeout_s)

    def _still_hold(self, kernels: Iterable[Kernel | FallbackKernel]) -> bool:
        """Return whether none of the kernels in memory was revoked, or has an expired verdict."""
        self._learn_revocations()
        loaded = (kernel.artifact.sha256 for kernel in kernels if isinstance(kernel, Kernel))
        return all(self._loader.holds(digest) for digest in loaded)

    def _learn_revocations(self) -> None:
        if self._belief.revocations.is_due() and not self._offline:
            session = self._connections.session(min(self._timeout_s, _REVOCATIONS_TIMEOUT_S))
            with suppress(ServiceFailed, SignatureInvalid, StoreFailed):
                self._belief.ask_revocations(session)

    def _find_kernel(
        self,
        question: Question,
        *,
        session: Session | None = None,
        answer: Answer | None = None,
        why_away: str | None = None,
    ) -> Kernel | FallbackKernel:
        """Return the kernel, by an answer that is there already, or else by asking."""
        locked = self._lock_of(question)
        if locked is not None:
            return self._locked_kernel(locked, question)
        kept = self._cache.answer(self._key(question))
        if why_away is not None:
            return self._kept_kernel(question, kept, why_away)
        try:
            return self._served_kernel(session or self._session(), question, kept, answer)
        except ServiceUnreachable as error:
            return self._kept_kernel(question, kept, str(error))

    def _served_kernel(
        self, session: Session, question: Question, kept: bytes | None, answer: Answer | None
    ) -> Kernel | FallbackKernel:
        if answer is None:
            answer, verdict = self._resolve(session, question, kept)
        else:
            verdict = self._belief.open_new(answer.envelope, question, session)
        self._belief.ask_revocations(session)
        if kept is not None:
            self._belief.check_not_older(
                [verdict], [question], lambda: [parse_answer(kept).envelope]
            )
        found = self._loader.kernel_or_none(verdict, question, session)
        if isinstance(found, NotFetched):
            return fallback(question, found)
        # Only what passed every check is kept, the answer last: it promises the artifact.
        self._cache.keep_answer(self._key(question), answer.document)
        self._note(verdict, answer.envelope)
        return found if isinstance(found, Kernel) else fallback(question, found)

    def _kept_kernel(
        self, question: Question, kept: bytes | None, why_away: str
    ) -> Kernel | FallbackKernel:
        """Return the kernel of the kept answer, if it still holds."""
        if kept is None:
            return fallback(question, NoKernel(reason=why_away))
        try:
            envelope = parse_answer(kept).envelope
            verdict = self._belief.open(envelope, question, self._belief.keys.kept())
            found = self._loader.kernel_or_none(verdict, question, None)
        except (KernelRejected, IsaNotUsable) as error:
            _LOG.info("The cached answer for %s is not used: %s", question.problem.text, error)
            found = NotFetched(reason=str(error))
        if isinstance(found, NotFetched):
            found = replace(found, reason=f"{why_away} The answer kept here: {found.reason}")
        else:
            self._note(verdict, envelope)
        return found if isinstance(found, Kernel) else fallback(question, found)

    def _note(self, verdict: VerdictPayload, envelope: SignedVerdict) -> None:
        locked = LockedKernel.of(verdict, envelope.key_id)
        self._given[locked.place] = locked

    def _find_layer(self, question: LayerQuestion) -> Layer:
        locked = self._locked_layer(question)
        if locked is not None:
            return locked
        request = self._layer_request(question)
        name = identity([self._address.url, request])
        kept = self._cache.answer(name)
        try:
            session = self._session()
            keys = self._belief.keys.at_first(session)
            document = session.resolve_batch(request)
            signers = [envelope.key_id for envelope in parse_envelopes(document)]
            keys = self._belief.keys.of_signers(session, keys, signers)
            verdicts = self._open_all(document, question, keys)
            self._belief.ask_revocations(session)
            if kept is not None:
                self._belief.check_not_older(
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

    def _locked_layer(self, question: LayerQuestion) -> Layer | None:
        """Return the layer if all of its problems are locked."""
        asked = [Question(problem=one, context=question.context) for one in question.problems]
        locked = [(kernel, one) for one in asked if (kernel := self._lock_of(one)) is not None]
        if len(locked) < len(asked):
            return None
        found = [self._locked_or_none(kernel, one) for kernel, one in locked]
        if self._frozen and any(isinstance(one, NotFetched) for one in found):
            raise NotLocked(
                f"a kernel that {self._lock_path} names for the layer {asked[0].problem.text!r} "
                "cannot be had; the warning before this says why."
            )
        return make_layer(question.problems, found, threads=question.context.threads)

    def _kept_layer(self, kept: bytes, question: LayerQuestion) -> Layer | None:
        try:
            verdicts = self._open_all(kept, question, self._belief.keys.kept())
            layer, is_whole = self._layer_of(verdicts, question, None)
        except (KernelRejected, IsaNotUsable) as error:
            _LOG.info("The cached answer for a layer is not used: %s", error)
            return None
        return layer if is_whole else None

    def _open_all(
        self, document: bytes, question: LayerQuestion, keys: Keys
    ) -> list[tuple[VerdictPayload, Question]]:
        """Return the verdicts in the answer for a layer, each with the question it answers."""
        envelopes = parse_envelopes(document)
        if len(envelopes) != len(question.problems):
            raise SignatureInvalid(
                f"the answer holds {len(envelopes)} verdicts for {len(question.problems)} "
                "problems; nothing was loaded: check the service."
            )
        questions = [
            Question(problem=problem, context=question.context) for problem in question.problems
        ]
        return [
            (self._belief.open(envelope, one, keys), one)
            for envelope, one in zip(envelopes, questions, strict=True)
        ]

    def _layer_of(
        self,
        verdicts: Iterable[tuple[VerdictPayload, Question]],
        question: LayerQuestion,
        session: Session | None,
    ) -> tuple[Layer, bool]:
        """Return the layer, and whether every kernel that was named could be had."""
        found = [self._loader.kernel_or_none(verdict, one, session) for verdict, one in verdicts]
        layer = make_layer(question.problems, found, threads=question.context.threads)
        return layer, not any(isinstance(one, NotFetched) for one in found)

    def _resolve(
        self, session: Session, question: Question, kept: bytes | None
    ) -> tuple[Answer, VerdictPayload]:
        self._belief.keys.at_first(session)
        answer = parse_answer(session.resolve(self._request(question), kept))
        return answer, self._belief.open_new(answer.envelope, question, session)

    def _request(self, question: Question) -> dict[str, Any]:
        return {"problem": question.problem.text, **self._where(question.context)}

    def _layer_request(self, question: LayerQuestion) -> dict[str, Any]:
        batch = self._batch_request(question.problems, question.context)
        return {**batch, "max_loss": question.max_loss}

    def _batch_request(
        self, problems: Iterable[Problem], context: ExecutionContext
    ) -> dict[str, Any]:
        return {"problems": [problem.text for problem in problems], **self._where(context)}

    def _where(self, context: ExecutionContext) -> dict[str, Any]:
        return {
            "cpu": WireCpu.of(self._cpu).model_dump(mode="json"),
            "threads": context.threads,
            "regime": context.regime.value,
        }

    def _key(self, question: Question) -> str:
        return identity([self._address.url, self._request(question)])
