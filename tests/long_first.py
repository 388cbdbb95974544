"""Tests that take long begin first, so that none is left alone at the end of a run."""

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests marked `long` where the processes of pytest-xdist begin.

    With `--dist worksteal`, each process begins with an equal part of the tests, one after the
    other, and takes from the end of the parts of others once it is done with its own.
    """
    parts = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.get_closest_marker("long")]
    short = [item for item in items if not item.get_closest_marker("long")]
    size, left = divmod(len(items), parts)
    items.clear()
    for part in range(parts):
        begun = long[part::parts]
        rest = size + (part < left) - len(begun)
        items += begun + short[: max(rest, 0)]
        del short[: max(rest, 0)]
    items += short
