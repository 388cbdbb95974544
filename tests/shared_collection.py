"""Processes of pytest-xdist share the work of compiling the tests, which all of them collect.

Each begins with another file, and finds what the others have compiled when it comes to that.
"""

import os
from collections.abc import Generator

import pytest

_WORKER = os.environ.get("PYTEST_XDIST_WORKER")
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Begin each folder where no other process begins."""
    report = yield
    if _WORKER is not None and isinstance(collector, pytest.Dir):
        begun = len(report.result) * int(_WORKER.removeprefix("gw")) // _WORKERS
        report.result = [*report.result[begun:], *report.result[:begun]]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests into the order that all processes have to agree on."""
    if _WORKER is not None:
        items.sort(key=lambda item: item.path.parts)
