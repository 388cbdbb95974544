"""Reading the small files in which Linux tells of itself."""

from pathlib import Path


def system_text(path: Path) -> str:
    """Return the text of a file below /proc or /sys without space around it, empty if it is not."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
