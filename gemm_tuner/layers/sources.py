"""Where the kernels of layers come from: a service, a database, a lock file, the local store."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from gemm_tuner.client.client import Client
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.measurement import Library
from gemm_tuner.domain.reason import speed_text
from gemm_tuner.domain.verdict import Basis, Verdict
from gemm_tuner.errors import InvalidSetting
from gemm_tuner.libraries.fallback import NoKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel
from gemm_tuner.select.choose import choose
from gemm_tuner.select.shared_weights import MAX_LOSS, could_be_served, layer_problems, share
from gemm_tuner.store.database import default_database_url, open_database
from gemm_tuner.store.repository import Repository
from gemm_tuner.tuning.stored import kernel_or_none
from gemm_tuner.tuning.tune import tune_layer

_DATABASES = ("sqlite:", "postgresql:")
_SERVICES = ("http:", "https:", "unix:")


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedLayer:
    """A linear layer of a model: y (rows, n) = epilogue(x (rows, k) @ w.T), for several `rows`.

    `beside` are libraries, by name, that compute it where it is left, and that other callers lack:
    a kernel that one of them was faster than is not taken.
    """

    n: int
    k: int
    rows: tuple[int | str, ...]
    dtype: str
    epilogue: str
    threads: int
    w_layout: str = "nk"
    reduction: str = "any"
    beside: tuple[str, ...] = ()

    @property
    def asked(self) -> dict[str, Any]:
        """Return the arguments that each function which finds or tunes a layer takes by name."""
        names = ("n", "k", "dtype", "epilogue", "w_layout", "reduction")
        return {"m": self.rows} | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTime:
    """Between what the time of a call lies, in ns, by the interval of its measurement."""

    least_ns: float
    greatest_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLayer:
    """The kernels for some of the rows, and why there are none for the others.

    `times` are those of a call for each of the rows, in `regime`: of its kernel, or where there is
    none, of the fastest library. None was not measured; all are left out by a source without times.
    Of one that `was_timed`, a kernel was compared with a library, whatever came out. `saved_ns` is
    the least time that the kernels save of a call, None where it is not known.
    """

    kernels: tuple[Kernel, ...]
    reasons: tuple[str, ...]
    regime: Regime | None = None
    times: tuple[CallTime | None, ...] = ()
    was_timed: bool = False
    saved_ns: float | None = None


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

    def tune(self, wanted: WantedLayer, budget_s: float) -> None:
        """Tune a layer, each of its rows for `budget_s` seconds, unless it was tuned before.

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
            return _best_of(self._find(wanted, regime) for regime in _REGIMES)

    def choices(self, wanted: WantedLayer) -> Sequence[FoundLayer]:
        """Return what `find` does, and where there is one number of rows, the next best kernels.

        Among them are those for weights in a cache, and those that were no faster than a library
        when they were timed alone.
        """
        found = [self.find(wanted)]
        if len(wanted.rows) == 1:
            with self._connected():
                found += [found_layer([one]) for one in self._next_best(wanted)]
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

    def _next_best(self, wanted: WantedLayer) -> Iterator[Kernel | NoKernel]:
        [problem] = layer_problems(**wanted.asked, max_loss=MAX_LOSS)
        for regime in _REGIMES:
            context = ExecutionContext(threads=wanted.threads, regime=regime)
            match = choose(self._repository, problem, cpu=self._cpu, context=context)
            for verdict in could_be_served(self._repository, match, self._cpu)[:MOST_CHOICES]:
                yield kernel_or_none(verdict, self._repository, self._cpu, wanted.threads)

    def tune(self, wanted: WantedLayer, budget_s: float, *, is_quiet: bool = False) -> None:
        """Tune a layer for weights that come from memory; unless `is_quiet`, say how far it is."""
        tune_layer(
            **wanted.asked,
            threads=wanted.threads,
            regime=_REGIMES[0],
            budget_s=budget_s,
            db_url=self.text,
            is_quiet=is_quiet,
        )

    def _find(self, wanted: WantedLayer, regime: Regime) -> FoundLayer:
        context = ExecutionContext(threads=wanted.threads, regime=regime)
        problems = layer_problems(**wanted.asked, max_loss=MAX_LOSS)
        sharing = share(self._repository, problems, cpu=self._cpu, context=context)
        verdicts = [one.chosen.verdict for one in sharing.kernels]
        found = not_behind(
            [kernel_or_none(one, self._repository, self._cpu, wanted.threads) for one in verdicts],
            wanted.beside,
        )
        times = [time_of(one, verdict) for one, verdict in zip(found, verdicts, strict=True)]
        return replace(found_layer(found, regime), times=tuple(times))


class ServedKernels:
    """Kernels from a service, by a client."""

    def __init__(self, client: Client, text: str | None = None, *, may_tune: bool = False) -> None:
        """Take a client; its lock file and settings hold. Only if it `may_tune`, `tune` waits."""
        self._client = client
        self._may_tune = may_tune
        self.text = text

    def tune(self, wanted: WantedLayer, budget_s: float) -> None:  # noqa: ARG002 - as in Source
        """Wait for the workers of the service, whose budgets are their own, up to a minute.

        Raises:
            InvalidSetting: the service is not to tune.
        """
        if not self._may_tune:
            raise InvalidSetting(
                "a service tunes nothing for a model; give tune='never', or a database as source."
            )
        problems = layer_problems(**wanted.asked, max_loss=MAX_LOSS)
        self._client.kernels(problems, threads=wanted.threads, regime=_REGIMES[0], tune="wait")
        self._client.ask_anew()

    def choices(self, wanted: WantedLayer) -> Sequence[FoundLayer]:
        """Return what `find` does: a service names one way."""
        return [self.find(wanted)]

    def find(self, wanted: WantedLayer) -> FoundLayer:
        """Return the kernels for a layer, those for weights from memory before others."""
        asked = wanted.asked | {"threads": wanted.threads}
        return _best_of(
            found_layer(
                not_behind(self._client.layer(**asked, regime=regime).kernels, wanted.beside)
            )
            for regime in _REGIMES
        )


# The weights of a model seldom stay in a cache from one call to the next.
_REGIMES = (Regime.COLD_WEIGHTS, Regime.HOT)

# A kernel for a range of m, or of another CPU, was timed with other sizes or elsewhere.
_TIMED = (Basis.MEASURED, Basis.SHARED)

# More of them are seldom faster, and each is timed in the model.
MOST_CHOICES = 3


Found = TypeVar("Found")


class _WithoutKernel(Protocol):
    """Why there is no kernel, and what one was compared with, if any was timed."""

    @property
    def reason(self) -> str: ...
    @property
    def compared_with(self) -> Library | None: ...


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
        was_timed=any(one.compared_with for one in others),
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
