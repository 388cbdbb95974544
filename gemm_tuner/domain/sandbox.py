"""How far a compiler and the kernels of a trial are shut off from the machine they run on."""

from dataclasses import dataclass
from enum import StrEnum


class SandboxLevel(StrEnum):
    """What shuts them off; docs/security.md says from what."""

    NAMESPACES = "namespaces"  # sees no other file, process or network than it needs
    LANDLOCK = "landlock"  # may open no other file, connect to no port, and signal nobody
    LIMITS = "limits"  # may use no more than so much memory, time and space
    NONE = "none"

    @property
    def hides_files(self) -> bool:
        """Return whether keys and other files of the user are out of reach."""
        return self in {SandboxLevel.NAMESPACES, SandboxLevel.LANDLOCK}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """The level that is reached here; `why` says what keeps a better one away."""

    level: SandboxLevel
    why: str = ""

    @property
    def text(self) -> str:
        """Return the level, and why it is no better: `limits (unshare: not permitted)`."""
        return f"{self.level.value} ({self.why})" if self.why else self.level.value
