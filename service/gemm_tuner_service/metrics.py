"""What a service tells Prometheus of itself.

With several processes, each writes its numbers into files of the folder that
`PROMETHEUS_MULTIPROC_DIR` names, and whichever is asked adds them up.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from gemm_tuner.domain.job import JobState

MEDIA_TYPE = CONTENT_TYPE_LATEST
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0)

REQUESTS = Counter(
    "gemm_tuner_requests", "Requests that were answered", ("method", "route", "status")
)
SECONDS = Histogram(
    "gemm_tuner_request_seconds", "Time to an answer", ("route",), buckets=_BOUNDS_S
)
IN_PROGRESS = Gauge(
    "gemm_tuner_requests_in_progress",
    "Requests that are being answered",
    multiprocess_mode="livesum",
)
TOKENS_REFUSED = Counter("gemm_tuner_tokens_refused", "Tokens that did not count")


class _Jobs(Collector):
    """The jobs of a database: as many for each of the processes that share it."""

    def __init__(self, counts: Mapping[JobState, int]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the one family that there is."""
        family = GaugeMetricFamily("gemm_tuner_jobs", "Jobs in the database", labels=("state",))
        for state, count in self._counts.items():
            family.add_metric((state.value,), count)
        yield family


def render(jobs: Mapping[JobState, int] | None = None) -> bytes:
    """Return all numbers in the text format of Prometheus; those of jobs where they are known."""
    registry = REGISTRY
    if folder := os.environ.get(FOLDER_VARIABLE):
        registry = CollectorRegistry()
        _forget_dead_processes(Path(folder))
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # the package has none
    numbers = generate_latest(registry)
    if jobs is None:
        return numbers
    of_jobs = CollectorRegistry()
    of_jobs.register(_Jobs(jobs))
    return numbers + generate_latest(of_jobs)


def _forget_dead_processes(folder: Path) -> None:
    """Drop what processes had in progress when they were killed."""
    for file in folder.glob("gauge_live*_*.db"):
        pid = file.stem.rpartition("_")[2]
        if not Path("/proc", pid).exists():
            file.unlink(missing_ok=True)
