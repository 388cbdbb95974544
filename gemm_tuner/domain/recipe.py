"""The recipe of a kernel: a trial with the same recipe is of the kernel that is made now."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A source, the compiler and its flags. Equal recipes give the same bytes.

    The source states the instructions that it needs and the version of the kernel ABI. `toolchain`
    names the compiler and its version. Records of old do not know the `flags`: they have none.
    """

    source_sha256: str
    toolchain: str
    flags: tuple[str, ...] = ()
