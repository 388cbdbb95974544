"""A generated C++ source, named by its content."""

from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The text of one translation unit."""

    text: str

    @property
    def sha256(self) -> str:
        """Return the hex digest of the text."""
        return sha256(self.text.encode()).hexdigest()
