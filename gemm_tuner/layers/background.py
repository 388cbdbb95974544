"""Tuning what a model lacks while the model runs."""

import logging
from threading import Lock, Thread

from gemm_tuner.layers.sources import Source, tune_or_tell
from gemm_tuner.layers.wanted import WantedLayer
from gemm_tuner.machine.forks import tell_of_forks
from gemm_tuner.machine.urgency import tuning_beside_calls

_LOG = logging.getLogger(__name__)


class BackgroundTuning:
    """Has a source tune one layer after the other, in a thread that ends with the program."""

    def __init__(self, source: Source, budget_s: float) -> None:
        """Take where to tune, and the time for each layer and number of rows in seconds."""
        self._source = source
        self._budget_s = budget_s
        self.after_fork()
        tell_of_forks(self)

    def after_fork(self) -> None:
        """Forget what waits: the thread is in another process."""
        self._lock = Lock()
        self._waiting: list[WantedLayer] = []
        self._thread: Thread | None = None

    @property
    def waiting(self) -> tuple[WantedLayer, ...]:
        """Return what is not tuned yet, first what is being tuned."""
        return tuple(self._waiting)

    def add(self, wanted: WantedLayer) -> None:
        """Have a layer tuned after those that wait."""
        with self._lock:
            if wanted in self._waiting:
                return
            self._waiting.append(wanted)
            if self._thread is not None:
                return
            self._thread = Thread(target=self._tune_all, name="gemm-tuner", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter ends, and starts no thread any more
                self._waiting, self._thread = [], None

    def stop(self) -> None:
        """Tune nothing after what is being tuned."""
        with self._lock:
            del self._waiting[1:]

    def _tune_all(self) -> None:
        with tuning_beside_calls():
            while True:
                with self._lock:
                    if not self._waiting:
                        self._thread = None
                        return
                    wanted = self._waiting[0]
                try:
                    failure = tune_or_tell(self._source, wanted, self._budget_s, is_quiet=True)
                except Exception as error:  # noqa: BLE001 - or nothing would be tuned any more
                    if "interpreter shutdown" in str(error):  # it starts no threads any more
                        return
                    _LOG.warning("%s was not tuned", wanted, exc_info=True)
                    failure = ""
                if failure:
                    _LOG.warning("A layer is not tuned in the background: %s", failure)
                with self._lock:
                    self._waiting.remove(wanted)
