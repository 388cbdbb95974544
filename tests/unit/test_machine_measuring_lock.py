"""One process measures at a time, and a killed one keeps nobody from it."""

import subprocess
import sys
from pathlib import Path

import pytest

from gemm_tuner.errors import StoreFailed
from gemm_tuner.machine.measuring_lock import MeasuringLock

_HOLDING = """
import sys
from pathlib import Path
from gemm_tuner.machine.measuring_lock import MeasuringLock

lock = MeasuringLock(Path(sys.argv[1]))
print(lock.acquire(), flush=True)
sys.stdin.read()
"""


def test_one_holds_it_until_it_lets_go(tmp_path: Path) -> None:
    one, other = (MeasuringLock(tmp_path / "folder" / "lock") for _ in range(2))

    assert one.acquire()
    assert one.acquire(), "it holds it already"
    assert not other.acquire()
    one.release()
    assert other.acquire()
    other.release()


def test_it_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDING, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"True\n"
        assert not MeasuringLock(path).acquire()
        holder.kill()
        holder.wait()

    lock = MeasuringLock(path)
    assert lock.acquire()
    lock.release()


def test_a_folder_that_cannot_be_written_is_a_clear_error() -> None:
    with pytest.raises(StoreFailed, match=r"/proc/none/lock cannot be made.*make its folder"):
        MeasuringLock(Path("/proc/none/lock")).acquire()
