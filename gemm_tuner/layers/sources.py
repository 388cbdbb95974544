"""Where the kernels of layers come from: a service, a database, a lock file, the local store."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf, nan
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

from gemm_tuner.client.client import Client
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.measurement import Library
from gemm_tuner.domain.printable import value_text
from gemm_tuner.domain.reason import speed_text
from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.errors import GemmTunerError, InvalidSetting, ServiceFailed
from gemm_tuner.layers.wanted import CallTime, FoundLayer, WantedLayer, WantedProduct
from gemm_tuner.libraries.fallback import NoKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.select.choose import choose
from gemm_tuner.select.shared_weights import could_be_served, share
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import default_database_url, open_database
from gemm_tuner.tuning.stored import kernel_or_none
from gemm_tuner.tuning.tune import tune, tune_layer

_DATABASES = ("sqlite:", "postgresql:")
_SERVICES = ("http:", "https:", "unix:")


@runtime_checkable
class Source(Protocol):
    """Finds kernels for layers. `text` opens it again in another process, if anything does."""

    text: str | None

    def find(self, wanted: WantedLayer) -> FoundLayer:
        """Return the kernels for a layer.

        Raises:
            GemmTunerError: the source cannot be asked, or what it holds cannot be used.
        """
        ...

    def choices(self, wanted: WantedLayer) -> Sequence[FoundLayer]:
        """Return the ways to compute a layer that are worth a comparison, the best first.

        Raises:
            GemmTunerError: as in `find`.
        """
        ...

    def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:
        """Tune a layer, each of its rows for `budget_s` seconds, unless it was tuned before.

        Unless it `is_quiet`, a line now and then says how far it is.

        Raises:
            GemmTunerError: nothing can be tuned here.
        """
        ...


@runtime_checkable
class HasSources(Protocol):
    """A source that keeps the C++ of its kernels."""

    def source_text(self, sha256: str) -> str | None:
        """Return the C++ of the kernel with this digest, None if it is not kept.

        Raises:
            GemmTunerError: what is kept is damaged.
        """
        ...


Tune = Literal["never", "background", "wait"]

AnySource = str | Path | Client | Source | None


def check_tuning(tune: object, budget_s: object) -> float:
    """Return the time to tune in seconds, once it and `tune` are known to be usable.

    Raises:
        InvalidSetting: `tune` is none that is known, or `budget_s` no positive time.
    """
    if not isinstance(tune, str) or tune not in get_args(Tune):
        known = ", ".join(get_args(Tune))
        raise InvalidSetting(f"tune = {value_text(tune)} is not known; use one of: {known}.")
    seconds = seconds_of(budget_s)
    if not 0 < seconds < inf:
        raise InvalidSetting(
            f"budget_s = {value_text(budget_s)} cannot be used; give a positive time."
        )
    return seconds


def seconds_of(time: object) -> float:
    """Return a time in seconds, as a float; NaN of what is no number."""
    if isinstance(time, bool) or not isinstance(time, Real):
        return nan
    try:
        return float(time)
    except OverflowError:
        return -inf if time < 0 else inf
    except (TypeError, ValueError):  # NumPy counts its times among numbers
        return nan


def tune_or_tell(
    source: Source, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False
) -> str:
    """Have a source tune what is wanted; return why it could not, if so."""
    try:
        source.tune(wanted, budget_s, is_quiet=is_quiet)
    except GemmTunerError as error:
        return str(error)
    return ""


def find_or_tell(source: Source, wanted: WantedLayer) -> FoundLayer:
    """Return the kernels that a source has for what is wanted, or why there are none."""
    try:
        found = source.find(wanted)
    except GemmTunerError as error:
        return FoundLayer(kernels=(), reasons=(str(error),))
    # A source that knows linear layers alone has others than were asked for.
    kernels = [one for one in found.kernels if one.problem.operation == wanted.operation]
    return replace(found, kernels=tuple(kernels))


class StoredKernels:
    """Kernels from a database on this machine, `url` or the user's own.

    It holds connections during a question alone: a model may have hundreds of layers.
    """

    def __init__(self, url: str | None = None) -> None:
        """Open the database; the user's own is created if it is missing.

        Raises:
            InvalidSetting: `url` is not a database URL.
            StoreFailed: there is no such database, or it cannot be opened.
        """
        self.text: str | None = url or default_database_url()
        self._engine = open_database(self.text, may_create=url is None)
        self._repository = Repository(self._engine)
        self._cpu: Cpu = detect_cpu()
        self._engine.dispose()

    def find(self, wanted: WantedLayer) -> FoundLayer:
        """Return the kernels for a layer, those for weights from memory before others."""
        with self._connected():
            return _best_of(self._find(wanted, regime) for regime in wanted.regimes)

    def choices(self, wanted: WantedLayer) -> Sequence[FoundLayer]:
        """Return what `find` does, and where there is one number of rows, the next best kernels.

        Among them are those for weights in a cache, and those that were no faster than a library
        when they were timed alone.
        """
        found = [self.find(wanted)]
        if len(wanted.rows) == 1:
            with self._connected():
                found += self._next_best(wanted)
        by_kernel = {tuple(one.artifact.sha256 for one in way.kernels): way for way in found}
        return list(by_kernel.values())[:MOST_CHOICES]

    def source_text(self, sha256: str) -> str | None:
        """Return the C++ of a kernel, None if the database does not keep it."""
        with self._connected():
            return self._repository.source_text(sha256)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._engine.dispose()

    def _next_best(self, wanted: WantedLayer) -> Iterator[FoundLayer]:
        [problem] = wanted.problems
        for regime in wanted.regimes:
            context = ExecutionContext(threads=wanted.threads, regime=regime)
            match = choose(self._repository, problem, cpu=self._cpu, context=context)
            for verdict in could_be_served(self._repository, match, self._cpu)[:MOST_CHOICES]:
                yield found_layer([self._loaded(verdict, wanted)])

    def _loaded(self, verdict: Verdict, wanted: WantedLayer) -> Kernel | NoKernel:
        return kernel_or_none(verdict, self._repository, self._cpu, wanted.threads)

    def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:
        """Tune what is wanted where its weights are; unless `is_quiet`, say how far it is."""
        how: dict[str, Any] = {
            "threads": wanted.threads,
            "regime": wanted.regimes[0],
            "budget_s": budget_s,
            "db_url": self.text,
            "is_quiet": is_quiet,
        }
        if not isinstance(wanted, WantedProduct):
            tune_layer(**wanted.asked, **how)
            return
        for problem in wanted.problems:
            tune(problem, **how)

    def _find(self, wanted: WantedLayer, regime: Regime) -> FoundLayer:
        context = ExecutionContext(threads=wanted.threads, regime=regime)
        if isinstance(wanted, WantedProduct):
            verdicts = [
                choose(self._repository, one, cpu=self._cpu, context=context).verdict
                for one in wanted.problems
            ]
        else:
            sharing = share(self._repository, wanted.problems, cpu=self._cpu, context=context)
            verdicts = [one.chosen.verdict for one in sharing.kernels]
        found = not_behind([self._loaded(one, wanted) for one in verdicts], wanted.beside)
        told = found_layer(found, regime)
        pairs = list(zip(found, verdicts, strict=True))
        if isinstance(wanted, WantedProduct):
            return replace(told, saved_ns=_saved_ns(pairs, wanted.beside))
        return replace(told, times=tuple(time_of(*pair) for pair in pairs))


Found = TypeVar("Found")


class _WithoutKernel(Protocol):
    """Why there is no kernel, and what one was compared with, if any was timed."""

    @property
    def reason(self) -> str: ...
    @property
    def compared_with(self) -> Library | None: ...


class ServedKernels:
    """Kernels from a service, by a client."""

    def __init__(self, client: Client, text: str | None = None, *, may_tune: bool = False) -> None:
        """Take a client; its lock file and settings hold. Only if it `may_tune`, `tune` waits."""
        self._client = client
        self._may_tune = may_tune
        self.text = text

    def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:  # noqa: ARG002 - as in Source
        """Wait for the workers of the service, whose budgets are their own, up to a minute.

        Raises:
            InvalidSetting: the service is not to tune.
            ServiceFailed: it timed nothing.
        """
        if not self._may_tune:
            raise InvalidSetting(
                "this service or lock file tunes nothing here; give tune='never', or a database "
                "as source."
            )
        found = self._client.kernels(
            wanted.problems, threads=wanted.threads, regime=wanted.regimes[0], tune="wait"
        )
        reasons = dict.fromkeys(
            one.reason for one in found if not isinstance(one, Kernel) and one.compared_with is None
        )
        # One that is away is not waited for again, for each layer of a model.
        self._client.ask_anew(forgets_absence=False)
        if reasons:
            raise ServiceFailed(" ".join(reasons))

    def choices(self, wanted: WantedLayer) -> Sequence[FoundLayer]:
        """Return what `find` does: a service names one way."""
        return [self.find(wanted)]

    def find(self, wanted: WantedLayer) -> FoundLayer:
        """Return the kernels for a layer, those for weights from memory before others."""
        return _best_of(
            found_layer(not_behind(self._served(wanted, regime), wanted.beside), regime)
            for regime in wanted.regimes
        )

    def _served(self, wanted: WantedLayer, regime: Regime) -> Sequence[Kernel | _WithoutKernel]:
        if isinstance(wanted, WantedProduct):
            return self._client.kernels(wanted.problems, threads=wanted.threads, regime=regime)
        asked = wanted.asked | {"threads": wanted.threads, "regime": regime}
        return self._client.layer(**asked).kernels


# A kernel for a range of m, or of another CPU, was timed with other sizes or elsewhere.
_TIMED = (Basis.MEASURED, Basis.SHARED)

# More of them are seldom faster, and each is timed in the model.
MOST_CHOICES = 3


def found_layer(
    found: Sequence[Kernel | _WithoutKernel], regime: Regime | None = None
) -> FoundLayer:
    """Return the kernels of `found`, each once, and the reasons of the others."""
    kernels = {one.artifact.sha256: one for one in found if isinstance(one, Kernel)}
    others = [one for one in found if not isinstance(one, Kernel)]
    return FoundLayer(
        kernels=tuple(kernels.values()),
        reasons=tuple(dict.fromkeys(one.reason for one in others)),
        regime=regime,
        fastest=tuple(dict.fromkeys(one.compared_with.name for one in others if one.compared_with)),
    )


def not_behind(found: Sequence[Found], libraries: Sequence[str]) -> list[Found | NoKernel]:
    """Return what was found, and in the place of kernels that these are faster than, why."""

    def checked(one: Found) -> Found | NoKernel:
        comparison = one.comparison if isinstance(one, Kernel) else None
        if comparison is None or not comparison.is_behind(libraries):
            return one
        reason = (
            f"it has {speed_text(comparison.ratio, comparison.baseline.text)}, which computes "
            "this where it is left."
        )
        return NoKernel(reason=reason, compared_with=comparison.baseline)

    return [checked(one) for one in found]


def _best_of(ways: Iterator[FoundLayer]) -> FoundLayer:
    """Return the first that has kernels, or else the first that has times, or was timed at all.

    Where a library was faster than a kernel in an earlier way, kernels that were not compared with
    any are left.
    """
    without: list[FoundLayer] = []
    for way in ways:
        is_doubtful = any(one.was_timed for one in without)
        kernels = tuple(one for one in way.kernels if one.comparison or not is_doubtful)
        if kernels:
            return replace(way, kernels=kernels)
        without.append(replace(way, kernels=()))
    return max(without, key=lambda found: (any(found.times), found.was_timed))


def time_of(found: Kernel | NoKernel, verdict: Verdict) -> CallTime | None:
    """Return the time of a call, if this very problem was measured on such a CPU."""
    measured = verdict.measurement
    if verdict.basis not in _TIMED or measured is None or measured.doubt is not None:
        return None
    library_ns, ratio = measured.baseline_median_ns, measured.ratio
    if not isinstance(found, Kernel):
        return CallTime(least_ns=library_ns, greatest_ns=library_ns)
    return CallTime(least_ns=library_ns / ratio.high, greatest_ns=library_ns / ratio.low)


def _saved_ns(
    pairs: Sequence[tuple[Kernel | NoKernel, Verdict]], beside: Collection[str]
) -> float | None:
    """Return the least that kernels save of a call, None if one was not timed for this problem.

    A library that computes it in their place, `beside` them, may be slower than the fastest.
    """
    saved: list[float] = []
    for found, verdict in pairs:
        if not isinstance(found, Kernel):
            continue
        time = time_of(found, verdict)
        if time is None or verdict.measurement is None:
            return None
        raced = [one for one in verdict.measurement.raced if one.is_usable]
        others = [one.call_ns for one in raced if one.baseline.split()[0] in beside]
        runs_ns = max(verdict.measurement.baseline_median_ns, *others, 0.0)
        saved.append(runs_ns - time.greatest_ns)
    return min(saved, default=None)


def open_source(source: AnySource, *, may_tune: bool = False) -> Source:
    """Return where kernels are asked for.

    Args:
        source: a `Client`, or another `Source`; the address of a service, `http://host:8000` or
            `unix:/path`; the URL of a database; the path of a lock file; or None for the user's own
            database.
        may_tune: whether a service may be asked to tune.

    Raises:
        InvalidSetting: it is none of these.
        StoreFailed: there is no such database, or it cannot be opened.
    """
    if isinstance(source, Client):
        return ServedKernels(source, may_tune=may_tune)
    if isinstance(source, Source):
        return source
    if source is None:
        return StoredKernels()
    text = str(source)
    if not isinstance(source, str | Path):
        raise _unknown(text)
    if text.startswith(_DATABASES):
        return StoredKernels(text)
    if text.startswith(_SERVICES):
        return ServedKernels(Client(text), text, may_tune=may_tune)
    if Path(source).suffix == ".lock":
        return ServedKernels(Client(lock=Path(source), frozen=True), text)
    raise _unknown(repr(text))


def _unknown(source: str) -> InvalidSetting:
    return InvalidSetting(
        f"source {source} is none that is known; give the address of a service "
        "(http://host:8000), the URL of a database (sqlite:////folder/file.sqlite3), "
        "the path of a lock file (gemm-tuner.lock), or a Client."
    )
