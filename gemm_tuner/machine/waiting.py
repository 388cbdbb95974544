"""How long processes have waited for a core that ran other work: no limit counts it against them.

Linux tells it of each thread, in schedstat of proc(5). Where it does not, nobody waited.
"""

import subprocess
import time
from contextlib import suppress
from pathlib import Path

_LOOK_S = 5.0
_NS = 1e-9
_SESSION = 3  # of the fields behind the name in /proc/PID/stat


def waited_for_core_s(process: int) -> float:
    """Return how long that thread of a process that waited longest has waited for a core, in s."""
    longest_ns = 0
    with suppress(OSError, ValueError, IndexError):  # it is over, or Linux does not tell
        for thread in Path(f"/proc/{process}/task").iterdir():
            longest_ns = max(longest_ns, int((thread / "schedstat").read_text().split()[1]))
    return longest_ns * _NS


def wait_for_session(leader: "subprocess.Popen[bytes]", longest_s: float) -> None:
    """Wait until the leader of a session ends.

    Its processes may take `longest_s`, and as long again as they waited for a core.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    began_s = time.monotonic()
    waited_s: dict[int, float] = {}  # of processes of the session, those that are over too
    while True:
        left_s = longest_s + sum(waited_s.values()) - (time.monotonic() - began_s)
        if left_s <= 0:
            raise subprocess.TimeoutExpired(leader.args, longest_s)
        with suppress(subprocess.TimeoutExpired):
            leader.wait(min(left_s, _LOOK_S))
            return
        for process in _session(leader.pid):
            waited_s[process] = max(waited_s.get(process, 0.0), waited_for_core_s(process))


def _session(leader: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # it is over
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[_SESSION]) == leader:
                found.append(int(folder.name))
    return found
