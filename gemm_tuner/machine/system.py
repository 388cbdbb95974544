"""The files in which Linux tells of a machine; any of them may be missing."""

import re
from dataclasses import dataclass
from pathlib import Path

_CPU_LIST = re.compile(r"(?:\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)?")


@dataclass(frozen=True, slots=True)
class SystemFiles:
    """The files below `root`, which are read anew each time."""

    root: Path = Path("/")

    def path(self, name: str) -> Path:
        """Return where a file is, named as in `proc/stat`."""
        return self.root / name

    def read(self, name: str) -> str | None:
        """Return the text of a file without white space around it, None if it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """Return the number in a file, None if there is none."""
        text = self.read(name)
        return int(text) if text and text.isdecimal() else None

    def cpus(self, name: str) -> frozenset[int] | None:
        """Return the CPUs that a file lists, as in `0-3,8`; None if there is no such list."""
        text = self.read(name)
        if text is None or not _CPU_LIST.fullmatch(text):
            return None
        bounds = [part.split("-") for part in text.split(",") if part]
        return frozenset(
            cpu
            for first, *rest in bounds
            for cpu in range(int(first), int((rest or [first])[0]) + 1)
        )

    def fields(self, name: str) -> dict[str, str]:
        """Return what a file such as `proc/meminfo` says: a name, a colon and a value in a line."""
        pairs = (line.partition(":") for line in (self.read(name) or "").splitlines())
        return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def cpus_text(cpus: frozenset[int]) -> str:
    """Return numbers of CPUs as the system lists them: `0-3,8`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in parts)
