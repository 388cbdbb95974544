"""The threads of an OpenMP runtime, for the time of a call."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from gemm_tuner.libraries.finish import TeamStruct

_SYSTEM = "libgomp.so.1"
_TEAM = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class OpenMp:
    """An OpenMP runtime: a library that is one or depends on one. Without one, nothing is set."""

    def __init__(self, library: ctypes.CDLL | None) -> None:
        self._openmp = library
        self._set_max_threads = getattr(library, "omp_set_num_threads", None)
        self._process = os.getpid()

    def max_threads(self) -> int:
        """Return how many threads OpenMP uses for the calling thread."""
        if self._openmp is None or self._set_max_threads is None:
            return 1
        threads: int = self._openmp.omp_get_max_threads()
        return threads

    def at_most(self, threads: int) -> int:
        """Return so many threads, or fewer if OpenMP has fewer; without one, nothing is known."""
        return threads if self._openmp is None else min(threads, self.max_threads())

    def team(self, threads: int) -> TeamStruct:
        """Return how this runtime runs a function in the threads that it has."""
        functions = [getattr(self._openmp, name) for name in _TEAM if hasattr(self._openmp, name)]
        if threads == 1 or len(functions) < len(_TEAM):
            return TeamStruct()
        return TeamStruct(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))

    @contextmanager
    def in_threads(self, threads: int | None) -> Iterator[int | None]:
        """Let the calling thread use `threads` threads of OpenMP; None for what it uses anyway.

        In a forked child it is one, because GNU's OpenMP waits for the others for ever there.
        """
        usable = threads if os.getpid() == self._process else 1
        if usable is None or self._set_max_threads is None:
            yield None
            return
        before = self.max_threads()
        self._set_max_threads(usable)
        try:
            yield usable
        finally:
            self._set_max_threads(before)


@cache
def system_openmp() -> OpenMp:
    """Return the OpenMP of the system, or one that sets nothing where there is none."""
    try:
        return OpenMp(ctypes.CDLL(_SYSTEM))
    except OSError:
        return OpenMp(None)
