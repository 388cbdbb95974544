"""Figures as people write them, with a fitting unit."""

from gemm_tuner.domain.context import ExecutionContext


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 problem`, `2 problems`."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def context_text(context: ExecutionContext) -> str:
    """Return a context as words: `hot, 1 thread`."""
    return f"{context.regime.value}, {counted(context.threads, 'thread')}"


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
