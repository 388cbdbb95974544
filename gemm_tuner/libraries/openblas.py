"""The OpenBLAS that NumPy brings along: where it is, its version and its threads."""

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Condition

import numpy as np

from gemm_tuner.errors import BaselineMissing


class OpenBlasLibrary:
    """OpenBLAS as NumPy has loaded it: what NumPy multiplies with."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.scipy_openblas_get_config64_.restype = ctypes.c_char_p
        config = library.scipy_openblas_get_config64_().decode()
        version = re.search(r"\d+\.\d+\.\d+", config)
        self.text = f"openblas {version[0] if version else 'unknown'}"
        self._set = library.scipy_openblas_set_num_threads64_
        self._get = library.scipy_openblas_get_num_threads64_
        self.forget_calls()

    def forget_calls(self) -> None:
        """Forget the calls that run now: in a forked child there are none."""
        self._condition = Condition()
        self._calls = 0
        self._threads = 0  # of the calls that run now, and those before them
        self._before = 0

    def set_threads(self, threads: int) -> None:
        """Let all of the process multiply in so many threads."""
        self._set(ctypes.c_int(threads))

    @contextmanager
    def in_threads(self, threads: int | None) -> Iterator[int]:
        """Let OpenBLAS use `threads` threads for a while; None for what it uses anyway.

        The number is one of the process, NumPy's own products included. Calls with the same number
        run at the same time, another number waits until they are done.
        """
        if threads is None:
            yield int(self._get())
            return
        condition = self._condition
        with condition:
            condition.wait_for(lambda: self._calls == 0 or self._threads == threads)
            if self._calls == 0:
                self._before, self._threads = int(self._get()), threads
                self.set_threads(threads)
            self._calls += 1
        try:
            yield threads
        finally:
            with condition:
                self._calls -= 1
                if self._calls == 0:
                    self.set_threads(self._before)
                    condition.notify_all()


def find_openblas() -> Path:
    """Return the library that NumPy uses.

    Raises:
        BaselineMissing: it uses another one.
    """
    folder = Path(np.__file__).parent.parent / "numpy.libs"
    for path in folder.glob("libscipy_openblas64_*.so"):
        return path
    raise BaselineMissing(
        f"no OpenBLAS lies beside NumPy ({folder}); install NumPy from its wheel."
    )


@cache
def open_openblas() -> OpenBlasLibrary:
    """Return the OpenBLAS of NumPy.

    Raises:
        BaselineMissing: NumPy uses another library, or it lacks a function.
    """
    try:
        library = OpenBlasLibrary(ctypes.CDLL(str(find_openblas())))
    except (OSError, AttributeError) as error:
        raise BaselineMissing(
            f"the OpenBLAS of NumPy does not load: {error}; install NumPy from its wheel."
        ) from error
    os.register_at_fork(after_in_child=library.forget_calls)
    return library
