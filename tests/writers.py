"""Processes that write to a store until they are killed."""

import subprocess
import sys
from pathlib import Path

# A line on stdout says that a kernel and its trial are in the store.
_WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from dataclasses import replace
from samples import add_build, make_trial
from gemm_tuner.store.sql.database import open_database
from gemm_tuner.store.repository import Repository

repository = Repository(open_database(sys.argv[1]))
for minute in range(int(sys.argv[3]), int(sys.argv[4])):
    artifact = add_build(repository, minute.to_bytes(4, "big") * 100_000)
    repository.add_trial(make_trial(minute=minute, artifact=artifact))
    print(minute, flush=True)
"""


def start_writer(url: str, first: int, last: int) -> subprocess.Popen[str]:
    """Start to add a kernel and a trial for each minute from `first` to before `last`."""
    tests = str(Path(__file__).parent)
    return subprocess.Popen(
        [sys.executable, "-c", _WRITER, url, tests, str(first), str(last)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def written_binary(minute: int) -> bytes:
    """Return the kernel that a writer added for a minute."""
    return minute.to_bytes(4, "big") * 100_000
