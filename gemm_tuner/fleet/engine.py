"""What places tasks on machines: its interface, and Dask behind it."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, ParamSpec, Protocol, TypeVar

from gemm_tuner.errors import MissingCapability
from gemm_tuner.fleet.library import load_distributed, security_of
from gemm_tuner.fleet.scheduler import Scheduler

_RESOURCE = "cpu:"  # and the class of CPUs; each worker has one of it
_TIMEOUT_S = 5.0

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class SchedulerUnreachable(MissingCapability):
    """The scheduler of a fleet does not answer, or refuses the certificate that it is shown."""


class Engine(Protocol):
    """Runs tasks on machines, each with CPUs of one class."""

    def places(self) -> Mapping[str, int]:
        """Return, by class of CPUs, how many workers there are now.

        Raises:
            SchedulerUnreachable: nobody can say.
        """

    def executor(self, class_key: str, names: Collection[str] = ()) -> Executor:
        """Return what runs tasks on CPUs of a class, of the workers with these names if any."""

    def close(self) -> None:
        """Let go of all tasks, and of the machines."""


class DaskEngine:
    """The machines of a Dask scheduler.

    Raises:
        MissingCapability: Dask is not installed.
        SchedulerUnreachable: the scheduler does not answer.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._executors: dict[str, Executor] = {}
        library = load_distributed()
        try:
            self._client: Any = library.Client(
                scheduler.address,
                security=security_of(scheduler),
                set_as_default=False,
                timeout=_TIMEOUT_S,
                name="gemm-tuner",
            )
        except (OSError, RuntimeError) as error:
            raise self._unreachable(error) from error

    def places(self) -> Mapping[str, int]:
        """Return, by class of CPUs, how many workers there are now.

        Raises:
            SchedulerUnreachable: the scheduler does not answer.
        """
        if self._client.status != "running":
            raise self._unreachable(self._client.status)
        try:
            facts = self._client.sync(self._client.scheduler.identity, callback_timeout=_TIMEOUT_S)
        except (OSError, RuntimeError, AttributeError) as error:  # closed meanwhile
            raise self._unreachable(error) from error
        return Counter(
            name.removeprefix(_RESOURCE)
            for worker in facts["workers"].values()
            for name in worker["resources"]
            if name.startswith(_RESOURCE)
        )

    def executor(self, class_key: str, names: Collection[str] = ()) -> Executor:
        """Return what runs tasks on CPUs of a class, of the workers with these names if any."""
        resources = resources_of(class_key)
        if names:
            among = self._client.get_executor(resources=resources, workers=[*names], pure=False)
            return _DaskExecutor(among, self._unreachable)
        if class_key not in self._executors:
            placing = self._client.get_executor(resources=resources, pure=False)
            self._executors[class_key] = _DaskExecutor(placing, self._unreachable)
        return self._executors[class_key]

    def close(self) -> None:
        """Let go of all tasks, and of the machines."""
        with suppress(Exception):  # where the scheduler is gone, there is nothing to say goodbye to
            self._client.close(timeout=_TIMEOUT_S)

    def _unreachable(self, why: object) -> SchedulerUnreachable:
        return SchedulerUnreachable(
            f"the scheduler {self._scheduler.address} does not answer ({why}); "
            "start it, or correct the address and the certificates."
        )


class _DaskExecutor(Executor):
    """An executor of Dask whose failures are errors of ours."""

    def __init__(
        self, placing: Executor, unreachable: Callable[[object], SchedulerUnreachable]
    ) -> None:
        self._placing = placing
        self._unreachable = unreachable

    def submit(
        self,
        fn: Callable[_Arguments, _Result],
        /,
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> Future[_Result]:
        """Return the future of a call on a machine.

        Raises:
            SchedulerUnreachable: the connection was lost.
        """
        try:
            return self._placing.submit(fn, *args, **kwargs)
        except Exception as error:  # several of its own, for a client that is closed meanwhile
            raise self._unreachable(error) from error


def resources_of(class_key: str) -> dict[str, float]:
    """Return what a worker for CPUs of a class has, and a task for them takes: one measurement."""
    return {f"{_RESOURCE}{class_key}": 1}
