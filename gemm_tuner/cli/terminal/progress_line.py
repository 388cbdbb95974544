"""The progress of one task, shown while it runs."""

import time
from collections.abc import Callable
from typing import Self

from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from gemm_tuner.cli.terminal.output import messages, print_message
from gemm_tuner.tuning.progress import Progress

_PLAIN_INTERVAL_S = 10.0


class ProgressLine:
    """Show the steps of one task: a bar on a terminal, else a plain line now and then.

    `later_s` is the time that the tasks after this one will take.
    """

    def __init__(self, label: str, *, later_s: float) -> None:
        self._label = label
        self._later_s = later_s
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=messages(),
            transient=True,
        )
        self._task = self._bar.add_task(label, total=None, note="")
        self._last_stage = ""
        self._last_s = 0.0

    def __enter__(self) -> Self:
        if messages().is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if messages().is_terminal:
            self._bar.stop()

    def begin(self) -> None:
        """Say that the task has begun, which takes some time before there is a first step."""
        if not messages().is_terminal:  # where the bar is seen
            print_message(f"{self._label}: preparing")

    def show(self, step: Progress) -> None:
        """Show where the task is."""
        note = step.note(self._later_s)
        if messages().is_terminal:
            self._bar.update(
                self._task,
                description=f"{self._label}: {step.stage}",
                completed=step.done,
                total=step.total,
                note=note,
            )
            return
        now_s = time.monotonic()
        if step.stage == self._last_stage and now_s - self._last_s < _PLAIN_INTERVAL_S:
            return
        self._last_stage, self._last_s = step.stage, now_s
        print_message(f"{self._label}: {step.stage} {step.done} of {step.total}, {note}")


def pace(line: ProgressLine) -> Callable[[str, int, int], None]:
    """Return what shows how far a task is, with the time left at its pace."""
    start_s = time.monotonic()

    def show(stage: str, done: int, total: int) -> None:
        spent_s = time.monotonic() - start_s
        line.show(
            Progress(
                stage=stage,
                done=done,
                total=total,
                best_ratio=None,
                remaining_s=spent_s / max(done, 1) * (total - done),
            )
        )

    return show
