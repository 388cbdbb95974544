"""Other work on a machine, for tests of measurements: bursts on random cores, with pauses.

    python benchmarks/disturber.py SEED

does what one worker does, until it is ended.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import numpy as np

_LONGEST_PAUSE_S = 4.0
_BURST_S = (0.05, 4.0)
_PERIOD_S = 0.02
_STREAMED_BYTES = 64 << 20
_SHARE_OF_STREAMING = 0.3


class Disturber:
    """Workers that disturb the machine while the `with` statement lasts, one for each core."""

    def __init__(self, seed: int) -> None:
        """Choose what the workers will do."""
        self._seeds = range(100 * seed, 100 * seed + len(os.sched_getaffinity(0)))
        self._workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for seed in self._seeds:
            command = [sys.executable, str(Path(__file__)), str(seed)]
            # Ctrl-C is for the owner, which ends them.
            self._workers.append(subprocess.Popen(command, start_new_session=True))
        return self

    def __exit__(self, *_error: object) -> None:
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.wait()


def disturb(seed: int, owner: int) -> None:
    """Alternate pauses and bursts of work on one random core, until the process `owner` is gone."""
    dice = random.Random(seed)
    cores = sorted(os.sched_getaffinity(0))
    streamed = np.zeros(_STREAMED_BYTES, np.uint8)
    target = np.empty_like(streamed)
    while os.getppid() == owner:
        time.sleep(dice.uniform(0.0, _LONGEST_PAUSE_S))
        os.sched_setaffinity(0, {dice.choice(cores)})
        duty = dice.uniform(0.2, 1.0)
        streams = dice.random() < _SHARE_OF_STREAMING
        end_s = time.monotonic() + dice.uniform(*_BURST_S)
        while time.monotonic() < end_s:
            busy_until_s = time.monotonic() + duty * _PERIOD_S
            while time.monotonic() < busy_until_s:
                if streams:
                    np.copyto(target, streamed)
            time.sleep((1.0 - duty) * _PERIOD_S)


if __name__ == "__main__":
    disturb(int(sys.argv[1]), os.getppid())
