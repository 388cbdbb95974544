"""What places tasks on machines: its interface, and Dask behind it."""

import asyncio
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol

from gemm_tuner.fleet.library import (
    TIMEOUT_S,
    SchedulerUnreachable,
    greet,
    load_distributed,
    security_of,
)
from gemm_tuner.fleet.scheduler import Scheduler

_RESOURCE = "cpu:"  # and the class of CPUs; each worker has one of it


class Placed(Protocol):
    """A task on some machine. What it returns stays there: to read it is to run what it says."""

    def done(self) -> bool:
        """Return whether it ended, or was lost."""


class Engine(Protocol):
    """Runs tasks on machines, each with CPUs of one class."""

    def places(self) -> Mapping[str, int]:
        """Return, by class of CPUs, how many workers there are now.

        Raises:
            SchedulerUnreachable: nobody can say.
        """

    def place(
        self,
        task: Callable[[str], object],
        job_id: str,
        *,
        class_key: str,
        names: Collection[str] = (),
    ) -> Placed:
        """Place a task on CPUs of a class, on a worker with one of these names if there are any.

        Raises:
            SchedulerUnreachable: nobody takes it.
        """

    def close(self) -> None:
        """Let go of all tasks, and of the machines."""


class DaskEngine:
    """The machines of a Dask scheduler. `tell` takes a line for people.

    Raises:
        MissingCapability: Dask is not installed.
        SchedulerUnreachable: the scheduler does not answer.
    """

    def __init__(self, scheduler: Scheduler, tell: Callable[[str], None]) -> None:
        self._scheduler = scheduler
        asyncio.run(greet(scheduler))
        try:
            with _telling_of_versions(tell):
                self._client: Any = load_distributed().Client(
                    scheduler.address,
                    security=security_of(scheduler),
                    set_as_default=False,
                    timeout=TIMEOUT_S,
                    name="gemm-tuner",
                )
        except Exception as error:  # of any kind, where something else answers
            raise SchedulerUnreachable.because(self._scheduler, error) from error

    def places(self) -> Mapping[str, int]:
        """Return, by class of CPUs, how many workers there are now.

        Raises:
            SchedulerUnreachable: the scheduler does not answer.
        """
        if self._client.status != "running":
            raise SchedulerUnreachable.because(self._scheduler, self._client.status)
        try:
            facts = self._client.sync(self._client.scheduler.identity, callback_timeout=TIMEOUT_S)
        except Exception as error:  # closed meanwhile, or something else answers
            raise SchedulerUnreachable.because(self._scheduler, error) from error
        return Counter(
            name.removeprefix(_RESOURCE)
            for worker in facts["workers"].values()
            for name in worker["resources"]
            if name.startswith(_RESOURCE)
        )

    def place(
        self,
        task: Callable[[str], object],
        job_id: str,
        *,
        class_key: str,
        names: Collection[str] = (),
    ) -> Placed:
        """Place a task on CPUs of a class, on a worker with one of these names if there are any.

        Raises:
            SchedulerUnreachable: the connection was lost.
        """
        among = {"workers": [*names]} if names else {}
        try:
            placed: Placed = self._client.submit(
                task, job_id, resources=resources_of(class_key), pure=False, **among
            )
        except Exception as error:  # several of its own, for a client that is closed meanwhile
            raise SchedulerUnreachable.because(self._scheduler, error) from error
        return placed

    def close(self) -> None:
        """Let go of all tasks, and of the machines."""
        with suppress(Exception):  # where the scheduler is gone, there is nothing to say goodbye to
            self._client.close(timeout=TIMEOUT_S)


@contextmanager
def _telling_of_versions(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell once if packages of the fleet differ; the library warns at each connection."""
    kind = load_distributed().versions.VersionMismatchWarning
    warnings.simplefilter("ignore", kind)  # also when it connects again by itself
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kind)
        yield
    for one in caught:
        if one.category is kind:
            _tell_once(tell, _of_versions(str(one.message)))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


@cache
def _tell_once(tell: Callable[[str], None], text: str) -> None:
    tell(text)


def _of_versions(message: str) -> str:
    """Return as a line what is a table in a warning: a row for each package with its versions."""
    rows = [line.strip("|").split("|") for line in message.splitlines() if line.startswith("|")]
    packages = [
        f"{package} {here} here, {there} at the scheduler, {of_workers} at workers"
        for package, here, there, of_workers in (
            [cell.strip(" {}") for cell in row] for row in rows[1:]
        )
    ]
    return (
        f"Packages of the fleet differ ({'; '.join(packages)}); if jobs fail, install the same "
        "versions on all machines."
    )


def resources_of(class_key: str) -> dict[str, float]:
    """Return what a worker for CPUs of a class has, and a task for them takes: one measurement."""
    return {f"{_RESOURCE}{class_key}": 1}
