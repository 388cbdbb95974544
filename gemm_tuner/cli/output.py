"""How the command line prints: results to stdout, progress and messages to stderr."""

import json
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from gemm_tuner.tuning.context_sweep import Progress

# A clamp:100:200 is not an emoji.
RESULTS = Console(highlight=False, soft_wrap=True, emoji=False)
MESSAGES = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

_PLAIN_INTERVAL_S = 10.0


def print_line(text: str) -> None:
    """Print a line of the result."""
    RESULTS.print(text, markup=False)


def print_message(text: str) -> None:
    """Print a line that is not part of the result."""
    MESSAGES.print(text, markup=False)


def print_json(facts: Any) -> None:  # noqa: ANN401 - JSON values have no narrower type
    """Print the result as JSON."""
    sys.stdout.write(json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; a column whose name starts with `>` is aligned to the right."""
    names = [column.lstrip(">") for column in columns]
    widths = [max(map(len, cells)) for cells in zip(names, *rows, strict=True)]
    print_line(title)
    for row in (names, *rows):
        cells = (
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        )
        print_line(("  " + "   ".join(cells)).rstrip())


def duration_text(seconds: float) -> str:
    """Return a duration as people write it: `850 ms`, `12 s`, `3 min 20 s`."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def bytes_text(size_bytes: int) -> str:
    """Return a size with a fitting unit: `640 B`, `24.0 KiB`, `64.0 MiB`."""
    for unit, scale in (("B", 1), ("KiB", 2**10), ("MiB", 2**20)):
        if size_bytes < 1024 * scale:
            return f"{size_bytes} B" if scale == 1 else f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes / 2**30:.1f} GiB"


def time_text(time_ns: float) -> str:
    """Return the time of one call with a fitting unit: `412 ns`, `1.24 µs`, `3.02 ms`."""
    for unit, scale in (("ns", 1.0), ("µs", 1e3), ("ms", 1e6)):
        if time_ns < 999.5 * scale:
            return f"{time_ns / scale:.3g} {unit}"
    return f"{time_ns / 1e9:.3g} s"


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
            console=MESSAGES,
            transient=True,
        )
        self._task = self._bar.add_task(label, total=None, note="")
        self._last_stage = ""
        self._last_s = 0.0

    def __enter__(self) -> Self:
        if MESSAGES.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if MESSAGES.is_terminal:
            self._bar.stop()

    def show(self, step: Progress) -> None:
        """Show where the task is."""
        note = f"{duration_text(step.remaining_s + self._later_s)} left"
        if step.best_ratio is not None:
            note = f"best {step.best_ratio:.2f} x baseline, {note}"
        if MESSAGES.is_terminal:
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
