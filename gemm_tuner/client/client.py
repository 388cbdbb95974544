"""From a problem to a callable kernel: memory, service, cache directory, or a library instead."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Literal, overload

from gemm_tuner.client.answer import Answer, parse_answer
from gemm_tuner.client.background import Background
from gemm_tuner.client.belief import Belief
from gemm_tuner.client.cache import Cache, default_cache_dir
from gemm_tuner.client.connection import Deadline
from gemm_tuner.client.keys import configured_keys, keys_by_id
from gemm_tuner.client.layers import Layers
from gemm_tuner.client.loading import Loader
from gemm_tuner.client.lock import LOCK_FILE, LockedKernel, Place, write_lock
from gemm_tuner.client.locked import Locked
from gemm_tuner.client.parallel import each_at_once
from gemm_tuner.client.question import (
    LayerQuestion,
    NotDownloaded,
    NotFetched,
    Question,
    Resolution,
    ask,
    callable_of,
    is_set,
)
from gemm_tuner.client.requests import Requests
from gemm_tuner.client.revocations import KnownRevocations
from gemm_tuner.client.single_flight import Once
from gemm_tuner.client.swapped import SwappedKernel
from gemm_tuner.client.transport import UNIX, Address, Asking, Connections, Session
from gemm_tuner.client.trusted_keys import BelievedKeys
from gemm_tuner.client.tuning import (
    TUNE_TIMEOUT_S,
    Follower,
    Tune,
    check_tune_timeout,
    wait_for_end,
)
from gemm_tuner.domain.canonical import identity
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.layer_problems import MAX_LOSS, layer_problems
from gemm_tuner.domain.problem import Problem
from gemm_tuner.errors import IsaNotUsable, KernelRejected, QuestionNotKnown, ServiceUnreachable
from gemm_tuner.libraries.fallback import FallbackKernel, NoKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.layer import Layer
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.trust.local import default_socket_path
from gemm_tuner.trust.payload import VerdictPayload

TIMEOUT_S = 10.0
NOT_SERVED_S = 10.0

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
        cache_dir: str | Path | None = None,
        cpu: Cpu | None = None,
        timeout_s: float = TIMEOUT_S,
        token: str | None = None,
        lock: str | Path | None = None,
        frozen: bool | None = None,
        offline: bool | None = None,
    ) -> None:
        address = Address.parse(f"{UNIX}{default_socket_path()}" if url is None else url)
        self._address = address.with_token(token)
        self._connections = Connections(self._address)
        self._offline = is_set("GEMM_TUNER_OFFLINE") if offline is None else offline
        self._timeout_s = timeout_s
        self._cache = Cache(Path(cache_dir) if cache_dir else default_cache_dir())
        cpu = cpu or detect_cpu()
        pinned = configured_keys() if public_keys is None else keys_by_id(public_keys)
        revocations = KnownRevocations(self._cache, identity(self._address.url))
        self._belief = Belief(
            address=self._address,
            cpu_key=cpu.exact_key,
            keys=BelievedKeys(self._address, pinned, revocations),
            revocations=revocations,
        )
        self._loader = Loader(self._cache, revocations, cpu)
        self._locked = Locked.read(
            Path(lock) if lock else None,
            is_frozen=is_set("GEMM_TUNER_FROZEN") if frozen is None else frozen,
            belief=self._belief,
            cache=self._cache,
            loader=self._loader,
        )
        self._requests = Requests(url=self._address.url, cpu=cpu)
        self._layer_finder = Layers(
            requests=self._requests,
            belief=self._belief,
            cache=self._cache,
            loader=self._loader,
            locked=self._locked,
        )
        self._background = Background(self._session, self._find_tuned)
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

    @overload
    def kernel(
        self,
        problem: Problem | str,
        *,
        threads: int = 1,
        regime: Regime | str = Regime.HOT,
        tune: Literal["never", "wait"] = "never",
        tune_timeout_s: float = TUNE_TIMEOUT_S,
    ) -> Kernel | FallbackKernel: ...

    @overload
    def kernel(
        self,
        problem: Problem | str,
        *,
        threads: int = 1,
        regime: Regime | str = Regime.HOT,
        tune: str,
        tune_timeout_s: float = TUNE_TIMEOUT_S,
    ) -> Kernel | FallbackKernel | SwappedKernel: ...

    def kernel(
        self,
        problem: Problem | str,
        *,
        threads: int = 1,
        regime: Regime | str = Regime.HOT,
        tune: str = "never",
        tune_timeout_s: float = TUNE_TIMEOUT_S,
    ) -> Kernel | FallbackKernel | SwappedKernel:
        """Return the kernel for a problem, ready to pack weights and to be called.

        It comes from memory, else from what the service answers now, else, when the service is
        away, from the cache directory. Where none is to be had, its download fails, or the baseline
        is faster, a `FallbackKernel` computes the same with that library, or with the best that can
        be called here, and says why in its `reason`.

        What was not measured for this CPU can be tuned by the service, where it lets this caller:
        with `wait` this returns what came out, and with `background` a `SwappedKernel`, in whose
        place a later call gets the kernel. Where nothing can be tuned, `reason` says why.

        Args:
            problem: a problem, or its text such as `f32 128x3072x768 nk bias+gelu_erf`.
            threads: how many threads will share a call; the kernel then uses as many.
            regime: the state of the caches when it is called, `hot` or `cold_weights`.
            tune: whether it may be tuned: `never`, `background` or `wait`.
            tune_timeout_s: how long `wait` waits after the first answer, up to 3600 s, before it
                fetches what came out; that which is tuned is tuned to its end.

        Raises:
            InvalidInput: the problem, threads, regime or way to tune cannot be used.
            KernelRejected: an answer or a kernel cannot be trusted, or is for another ABI.
            IsaNotUsable: the kernel needs features that are not usable here.
            ServiceFailed: the service refused the question.
        """
        question = ask(problem, threads, regime)
        how = Tune.parse(tune)
        check_tune_timeout(tune_timeout_s)
        if how is Tune.BACKGROUND and (pending := self._background.pending(question)):
            return pending
        found = self._kernels.find(question, lambda: self._find_kernel(question, self._begin()))
        return self._tuned(question, found, how, Deadline(tune_timeout_s), Event())

    def _tuned(
        self,
        question: Question,
        found: Kernel | FallbackKernel,
        how: Tune,
        deadline: Deadline,
        is_given_up: Event,
    ) -> Kernel | FallbackKernel | SwappedKernel:
        """Return what answers a question once it is tuned, or is being tuned, where that can be."""
        if how is Tune.NEVER or not self._is_tunable(question, found):
            return found
        request = self._requests.of_question(question)
        if how is Tune.BACKGROUND:
            return self._background.tune(question, request, found)
        ended = wait_for_end(Follower(request, deadline), self._session, is_given_up)
        why = ended.why
        if ended.is_worth_asking:
            try:
                found = self._find_tuned(question, found)
            except ServiceUnreachable as error:
                why = f"{why} {error}"
        return found if isinstance(found, Kernel) else found.because(why)

    def layer(
        self,
        n: int,
        k: int,
        *,
        m: Iterable[int | str],
        dtype: str = "f32",
        epilogue: str = "none",
        w_layout: str = "nk",
        reduction: str = "any",
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
            reduction: `any`, or `fixed` for the same bits from every kernel.
            threads: how many threads will share a call.
            regime: the state of the caches when it is called, `hot` or `cold_weights`.
            max_loss: the share of its speed that each m may lose so that weights are shared.

        Raises:
            InvalidInput: an argument cannot be used.
            GemmTunerError: as in `kernel`.
        """
        words = {"dtype": dtype, "epilogue": epilogue, "w_layout": w_layout, "reduction": reduction}
        question = LayerQuestion(
            problems=layer_problems(n, k, m=m, max_loss=max_loss, **words),
            context=ExecutionContext(threads=threads, regime=Regime.parse_one(regime)),
            max_loss=max_loss,
        )
        return self._layers.find(question, lambda: self._layer_finder.find(question, self._begin()))

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

    def ask_anew(self, *, forgets_absence: bool = True) -> None:
        """Forget which problems have no kernel, and that the service was away.

        Otherwise nothing is asked for 10 s of such a problem, and of such a service for 5 s.
        """
        self._kernels.forget_brief()
        self._layers.forget_brief()
        if forgets_absence:
            self._connections.forget_absence()

    @overload
    def kernels(
        self,
        problems: Iterable[Problem | str],
        *,
        threads: int = 1,
        regime: Regime | str = Regime.HOT,
        tune: Literal["never", "wait"] = "never",
        tune_timeout_s: float = TUNE_TIMEOUT_S,
    ) -> list[Kernel | FallbackKernel]: ...

    @overload
    def kernels(
        self,
        problems: Iterable[Problem | str],
        *,
        threads: int = 1,
        regime: Regime | str = Regime.HOT,
        tune: str,
        tune_timeout_s: float = TUNE_TIMEOUT_S,
    ) -> list[Kernel | FallbackKernel | SwappedKernel]: ...

    def kernels(
        self,
        problems: Iterable[Problem | str],
        *,
        threads: int = 1,
        regime: Regime | str = Regime.HOT,
        tune: str = "never",
        tune_timeout_s: float = TUNE_TIMEOUT_S,
    ) -> list[Kernel | FallbackKernel] | list[Kernel | FallbackKernel | SwappedKernel]:
        """Return the kernels for many problems, such as all layers of a model, in their order.

        They are those that `kernel` returns one by one, but are asked for at once, and downloaded
        side by side. All of it takes at most `timeout_s`, and with `wait` `tune_timeout_s` more for
        all that is tuned, and `timeout_s` to fetch what came out.

        Raises:
            GemmTunerError: as in `kernel`.
        """
        how = Tune.parse(tune)
        check_tune_timeout(tune_timeout_s)
        questions = [ask(problem, threads, regime) for problem in problems]
        missing = [one for one in dict.fromkeys(questions) if self._kernels.known(one) is None]
        look = self._look_in_batch([one for one in missing if self._locked.of(one) is None])

        def find(question: Question) -> Kernel | FallbackKernel:
            return self._kernels.find(question, lambda: look(question))

        found = dict(zip(missing, each_at_once(find, missing), strict=True))
        each = {one: found.get(one) or find(one) for one in questions}
        if how is Tune.NEVER:
            return [each[one] for one in questions]
        deadline, is_given_up = Deadline(tune_timeout_s), Event()

        def tuned(question: Question) -> Kernel | FallbackKernel | SwappedKernel:
            pending = self._background.pending(question) if how is Tune.BACKGROUND else None
            return pending or self._tuned(question, each[question], how, deadline, is_given_up)

        better = dict(zip(each, each_at_once(tuned, [*each], is_given_up.set), strict=True))
        return [better[one] for one in questions]

    @property
    def given(self) -> Mapping[Place, LockedKernel]:
        """Return the answers that this client was given or has locked, as a lock file has them."""
        return MappingProxyType(self._locked.given)

    def write_lock(self, path: Path = LOCK_FILE) -> None:
        """Write a lock file of what this client was given for the problems that it asked for.

        Raises:
            InvalidSetting: it cannot be written.
        """
        write_lock(path, self._locked.given.values())

    def _is_tunable(self, question: Question, found: Kernel | FallbackKernel) -> bool:
        """Return whether the service may be asked to find a better kernel by tuning."""
        if self._offline or self._locked.of(question) is not None:
            return False
        return not isinstance(found, Kernel) or self._loader.is_tunable(found)

    def _find_tuned(
        self, question: Question, old: Kernel | FallbackKernel
    ) -> Kernel | FallbackKernel:
        """Return the kernel that the service has now, in the place of an old one.

        Raises:
            ServiceUnreachable: the service does not answer, or its kernel could not be downloaded.
        """

        def look() -> Kernel | FallbackKernel:
            kept = self._cache.answer(self._key(question))
            found = self._served_kernel(self._session(), question, kept, None)
            if isinstance(found, NotDownloaded):  # the job is done, and its kernel is there
                raise ServiceUnreachable(found.reason)
            return callable_of(question, found)

        return self._kernels.find(question, look, old=old)

    def _session(self) -> Session:
        if self._offline:
            raise ServiceUnreachable(
                f"the service at {self._address.url} is not asked, because this client is offline; "
                "unset GEMM_TUNER_OFFLINE, or give offline=False."
            )
        self._connections.check_presence()
        return self._connections.session(self._timeout_s)

    def _begin(self) -> Asking:
        """Return what asks the service until the deadline of an ask, or why nothing does."""
        try:
            return self._session()
        except ServiceUnreachable as error:
            self._belief.learn_revocations(None)
            return error

    def _look_in_batch(
        self, questions: Sequence[Question]
    ) -> Callable[[Question], Kernel | FallbackKernel]:
        """Ask for all of `questions`, and return what finds the kernel for these and others.

        All of them share one deadline.
        """
        asking = self._begin()
        answers: dict[Question, Answer] = {}
        if isinstance(asking, Session) and questions:
            try:
                self._belief.keys.at_first(asking)
                answers = self._requests.answers(asking, questions)
            except ServiceUnreachable as error:
                asking = error
        return lambda one: self._find_kernel(one, asking, answers.get(one))

    def _still_hold(self, kernels: Iterable[Kernel | FallbackKernel]) -> bool:
        """Return whether none of the kernels in memory was revoked, or has an expired verdict."""
        if self._belief.revocations.is_due() and not self._offline:
            self._belief.learn_revocations(self._connections.session(self._timeout_s))
        return all(self._loader.holds(one) for one in kernels if isinstance(one, Kernel))

    def _find_kernel(
        self, question: Question, asking: Asking, answer: Answer | None = None
    ) -> Kernel | FallbackKernel:
        """Return the kernel, by an answer that is there already, or else by asking."""
        locked = self._locked.of(question)
        if locked is not None:
            found = self._locked.load(locked, question, asking)
            return callable_of(question, found)
        kept = self._cache.answer(self._key(question))
        if not isinstance(asking, Session):
            return self._kept_kernel(question, kept, str(asking))
        try:
            found = self._served_kernel(asking, question, kept, answer)
        except (ServiceUnreachable, QuestionNotKnown) as error:
            return self._kept_kernel(question, kept, str(error))
        return callable_of(question, found)

    def _served_kernel(
        self, session: Session, question: Question, kept: bytes | None, answer: Answer | None
    ) -> Kernel | NoKernel:
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
            return found
        # Only what passed every check is kept, the answer last: it promises the artifact.
        self._cache.keep_answer(self._key(question), answer.document)
        self._locked.note(verdict, answer.envelope.key_id)
        return found

    def _kept_kernel(
        self, question: Question, kept: bytes | None, why_away: str
    ) -> Kernel | FallbackKernel:
        """Return the kernel of the kept answer, if it still holds."""
        if kept is None:
            return callable_of(question, NoKernel(reason=why_away))
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
            self._locked.note(verdict, envelope.key_id)
        return callable_of(question, found)

    def _resolve(
        self, session: Session, question: Question, kept: bytes | None
    ) -> tuple[Answer, VerdictPayload]:
        self._belief.keys.at_first(session)
        answer = parse_answer(session.resolve(self._requests.of_question(question), kept))
        return answer, self._belief.open_new(answer.envelope, question, session)

    def _key(self, question: Question) -> str:
        return self._requests.name(self._requests.of_question(question))
