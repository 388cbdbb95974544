import signal
import subprocess
import sys

PRINTING = """
import signal, sys
from gemm_tuner.cli.terminal.interrupt import StopOnInterrupt

with StopOnInterrupt() as interrupt:
    class Raising:
        def write(self, text):
            if not interrupt.is_stopped():
                signal.raise_signal(signal.SIGINT)  # in the middle of printing
            return len(text)
        def flush(self):
            pass
    stream = sys.stderr
    sys.stderr = Raising()
    print("progress", file=sys.stderr, end="")
    sys.stderr = stream
    assert interrupt.is_stopped()
"""


def test_the_first_interrupt_does_not_print_into_what_is_being_printed() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PRINTING], capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stderr
    assert result.stderr == (  # also where it waits, and none is in flight
        "Stopping after the trial in flight, if any; press Ctrl-C again to abort.\n"
    )


def test_the_second_interrupt_aborts() -> None:
    script = """
import signal
from gemm_tuner.cli.terminal.interrupt import StopOnInterrupt

with StopOnInterrupt():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)

    assert result.returncode == -signal.SIGINT


def test_nobody_need_read_the_notice() -> None:
    script = """
import os, signal
from gemm_tuner.cli.terminal.interrupt import StopOnInterrupt

os.close(2)
with StopOnInterrupt() as interrupt:
    signal.raise_signal(signal.SIGINT)
    assert interrupt.is_stopped()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)

    assert result.returncode == 0
