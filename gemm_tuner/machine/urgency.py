"""How urgent the processes are that a tuning starts, beside other work on this machine."""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# The lowest: other work gets 68 times as much of a core that it shares (sched(7)). On an idle core
# the same is timed.
NICENESS = 19

_GROUP_PAUSE_S = 0.1
_GROUP_TRIES = 5

_beside: set[object] = set()  # tunings that run beside calls of this program
os.register_at_fork(after_in_child=_beside.clear)  # their threads are not in a forked child


def lower_urgency(niceness: int = NICENESS) -> None:
    """Let other work go before this thread and what it starts, unless a sandbox forbids that."""
    with suppress(OSError):
        os.nice(niceness)


@contextmanager
def tuning_beside_calls() -> Iterator[None]:
    """Let this program's own work go before the processes that are started meanwhile.

    Threads stay as urgent as they are: one that waits for a core may hold Python's lock.
    """
    tuning = object()
    _beside.add(tuning)
    try:
        yield
    finally:
        _beside.discard(tuning)


def start_session(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":  # noqa: ANN401 - those of Popen
    """Start a command in a session of its own, which no Ctrl-C reaches, as urgent as this process.

    Linux may share the processors between sessions first, and only then between the processes of
    each (sched_autogroup in sched(7)): so both are given the niceness.

    Raises:
        OSError: the command cannot be started.
    """
    process = subprocess.Popen(command, start_new_session=True, **options)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    niceness = max(own, NICENESS) if _beside else own
    if niceness > 0:
        with suppress(OSError):  # it may be over
            os.setpriority(os.PRIO_PGRP, process.pid, niceness)
        _lower_group(process, niceness)
    return process


def _lower_group(process: "subprocess.Popen[bytes]", niceness: int) -> None:
    """Give a session its niceness, where Linux has such groups, while it runs already.

    Of all groups of a machine, those who are not root may change one each `_GROUP_PAUSE_S`.
    """
    group = Path(f"/proc/{process.pid}/autogroup")
    for _ in range(_GROUP_TRIES):
        try:
            group.write_text(str(niceness))
        except BlockingIOError:  # another was changed just before
            if process.poll() is not None:
                return
            time.sleep(_GROUP_PAUSE_S)
        except OSError:
            return
        else:
            return
