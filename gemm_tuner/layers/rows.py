"""The kernels of one layer, for the numbers of rows that come, and its weights packed for them."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from threading import RLock, Thread
from typing import Any
from weakref import ref

from numpy.typing import NDArray

from gemm_tuner.arrays.packed import PackedWeights
from gemm_tuner.domain.layer_problems import MOST_PROBLEMS
from gemm_tuner.domain.problem import MAX_OPERAND_BYTES, Problem
from gemm_tuner.domain.rows import MAX_DIMENSION, Rows
from gemm_tuner.errors import GemmTunerError
from gemm_tuner.layers.sources import Source, Tune, tune_or_tell
from gemm_tuner.layers.wanted import FoundLayer, WantedLayer
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.forks import tell_of_forks
from gemm_tuner.machine.urgency import tuning_beside_calls
from gemm_tuner.runtime.load import Kernel

_LOG = logging.getLogger(__name__)

_MOST_READY = 4096
_WIDEST_BYTES = 4
_NOTHING = FoundLayer(kernels=(), reasons=())


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """What computes a call, and the weights in its layout."""

    kernel: Kernel | FallbackKernel
    packed: PackedWeights


class RowKernels:
    """Finds what computes a number of rows; any number of threads may ask.

    Where the rows are not given, each of the first that come is asked for, up to 16. Kernels share
    packed weights where the source finds such. One library computes all other rows.
    """

    def __init__(
        self,
        wanted: WantedLayer,
        w: NDArray[Any],
        *,
        source: Source,
        tune: Tune,
        budget_s: float,
    ) -> None:
        """Take the layer, with the rows to ask for, if any are given, and its weights, to keep."""
        self._wanted = wanted
        self._w = w
        self._source = source
        self._tune = tune
        self._budget_s = budget_s
        self._takes_rows = not wanted.rows
        self._forget()
        tell_of_forks(self)

    def after_fork(self) -> None:
        """Ask again: a thread that tunes is in another process."""
        self._forget()

    def _forget(self) -> None:
        # A signal handler may ask what computes. Who asks a source holds the first, for as long as
        # it tunes; the second is held for moments.
        self._asking, self._lock = RLock(), RLock()
        self._refreshed = self._asked = 0  # how often, and that when the source was asked
        self._ready: dict[int, Ready] = {}
        self._copies: dict[str, PackedWeights] = {}
        self._rows: tuple[int | str, ...] = ()
        self._found = _NOTHING
        self._failures: dict[str, None] = {}
        self._pending: list[int | str] = []
        self._is_tuning = False

    def refresh(self) -> None:
        """Ask for kernels again at the next calls."""
        with self._lock:
            self._ready = {}
            self._refreshed += 1

    def known(self, rows: int) -> Ready | None:
        """Return what computes so many rows, if that was asked for before."""
        return self._ready.get(rows)

    def find(self, rows: int) -> Ready:
        """Return what computes so many rows; the first time the source is asked, or tunes."""
        with self._asking:
            known = self._ready.get(rows)
            if known is not None:
                return known
            refreshed = self._refreshed
            if self._asked != refreshed:
                self._asked, self._rows, self._found, self._failures = refreshed, (), _NOTHING, {}
            self._ask(rows)
            with self._lock:
                ready = self._ready_of(rows)
                if self._refreshed == refreshed:
                    if len(self._ready) >= _MOST_READY:
                        self._ready = {}
                    self._ready[rows] = ready
                return ready

    def explain(self) -> str:
        """Return in words what computes each number of rows that was asked for, and why."""
        with self._lock:
            is_asked = self._asked == self._refreshed
            found, failures = (self._found, [*self._failures]) if is_asked else (_NOTHING, [])
            ready, pending = dict(self._ready), list(self._pending)
        problem = self._problem(1, 1)
        lines = [problem.text.replace(" 1x", " *x", 1)]
        for rows, one in sorted(ready.items()):
            reason = f": {one.kernel.reason}" if one.kernel.reason else ""
            lines.append(f"  m = {rows}: {one.kernel.library}{reason}")
        reasons = dict.fromkeys([*found.reasons, *failures])
        lines += [f"  without a kernel: {reason}" for reason in reasons]
        lines += [f"  m = {rows}: is being tuned" for rows in pending]
        return "\n".join(lines)

    def _ask(self, rows: int) -> None:
        """Ask the source for `rows` too, or for what was given, unless that was done."""
        if rows == 0 or (self._rows and not self._takes_rows):
            return
        new = self._wanted.rows or (rows,)
        if rows in self._rows or len(self._rows) + len(new) > MOST_PROBLEMS:
            return
        together = (*self._rows, *new)
        self._look(together)
        lacking = [one for one in new if not self._has_kernel(one)]
        if self._tune == "wait" and lacking:
            self._tune_rows(lacking)
            self._look(together)
        elif self._tune == "background":
            with self._lock:
                self._begin_tuning(lacking)
        self._rows = together  # not if it was interrupted

    def _look(self, rows: tuple[int | str, ...]) -> None:
        try:
            self._found = self._source.find(replace(self._wanted, rows=rows))
        except GemmTunerError as error:
            self._failures[str(error)] = None

    def _has_kernel(self, rows: int | str) -> bool:
        wanted = Rows.parse(str(rows))
        held = [one.problem.m for one in self._found.kernels]
        return any(wanted.low in one and wanted.high in one for one in held)

    def _ready_of(self, rows: int) -> Ready:
        fitting = [one for one in self._found.kernels if rows in one.problem.m]
        kernel: Kernel | FallbackKernel = self._fallback
        if fitting:
            kernel = min(fitting, key=lambda one: one.problem.m.high - one.problem.m.low)
        name = kernel.packed_format
        if name not in self._copies:
            self._copies[name] = kernel.pack(self._w)
        return Ready(kernel, self._copies[name])

    @cached_property
    def _fallback(self) -> FallbackKernel:
        wanted = self._wanted
        row_bytes = _WIDEST_BYTES * max(1, wanted.n, wanted.k)
        problem = self._problem(0, min(MAX_DIMENSION, MAX_OPERAND_BYTES // row_bytes))
        return FallbackKernel(problem=problem, reason="", threads=wanted.threads)

    def _problem(self, low: int, high: int) -> Problem:
        wanted = self._wanted
        return Problem.create(
            f"{low}..{high}",
            wanted.n,
            wanted.k,
            dtype=wanted.dtype,
            w_layout=wanted.w_layout,
            epilogue=wanted.epilogue,
            reduction=wanted.reduction,
        )

    def _tune_rows(self, rows: Iterable[int | str], *, is_quiet: bool = False) -> None:
        """Have the source tune."""
        wanted = replace(self._wanted, rows=tuple(rows))
        if failure := tune_or_tell(self._source, wanted, self._budget_s, is_quiet=is_quiet):
            self._failures[failure] = None

    def _begin_tuning(self, rows: list[int | str]) -> None:
        self._pending += [one for one in rows if one not in self._pending]
        if not self._pending or self._is_tuning:
            return
        thread = Thread(target=_tune_pending, args=(ref(self),), name="gemm-tuner", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, and starts no thread any more
            self._pending = []
            return
        self._is_tuning = True

    def tune_next(self) -> bool:
        """Tune what waits longest, and use what came out; return whether anything waited."""
        with self._lock:
            if not self._pending:
                self._is_tuning = False
                return False
            rows = self._pending[0]
        try:
            self._tune_rows([rows], is_quiet=True)
        except Exception as error:  # noqa: BLE001 - or nothing would be tuned any more
            _LOG.warning("m = %s was not tuned", rows, exc_info=True)
            self._failures[f"m = {rows} was not tuned: {error}"] = None
        with self._asking:
            if self._rows:
                self._look(self._rows)
        with self._lock:
            if rows in self._pending:  # not in a child of a fork
                self._pending.remove(rows)
            self._ready = {known: self._ready_of(known) for known in self._ready}
            used = [
                self._fallback.packed_format,
                *(one.kernel.packed_format for one in self._ready.values()),
            ]
            self._copies = {name: self._copies[name] for name in used if name in self._copies}
        return True


def _tune_pending(kernels: "ref[RowKernels]") -> None:
    """Tune what waits, as long as there is anything and somebody has the layer."""
    with tuning_beside_calls():
        while (own := kernels()) is not None and own.tune_next():
            del own
