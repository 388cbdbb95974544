"""A compiled kernel, named by the sha256 of its bytes."""

from dataclasses import dataclass
from hashlib import sha256

from gemm_tuner.domain.cpu import IsaFeature, isa_text
from gemm_tuner.domain.recipe import Recipe
from gemm_tuner.errors import AbiMismatch, DigestMismatch, IsaNotUsable

# The newest version, and those that this package calls: kernels of version 2 cannot pack their
# weights in parts. New kernels say the version of their operation.
ABI_VERSION = 5
CALLED_ABI_VERSIONS = (2, 3, 4, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """The description of a kernel binary, known without loading it.

    `toolchain` names the compiler and its version, and `flags` are those that it was given; the
    same compiler, flags and source give the same bytes. Records of old do not know the flags.
    """

    sha256: str
    size_bytes: int
    abi_version: int
    required_isa: frozenset[IsaFeature]
    toolchain: str
    source_sha256: str
    flags: tuple[str, ...] = ()

    @property
    def recipe(self) -> Recipe:
        """Return the recipe of the binary: all that it was compiled from."""
        return Recipe(source_sha256=self.source_sha256, toolchain=self.toolchain, flags=self.flags)

    def check(self, binary: bytes, usable: frozenset[IsaFeature]) -> None:
        """Check that `binary` is this artifact and may be loaded where `usable` is usable.

        Raises:
            DigestMismatch: the bytes are not those that the artifact is named after.
            IsaNotUsable: the kernel needs features that are not usable.
            AbiMismatch: the kernel has a version of the ABI that this package does not call.
        """
        self.check_digest(binary)
        missing = self.required_isa - usable
        if missing:
            raise IsaNotUsable(
                f"kernel {self.sha256[:12]} needs {isa_text(missing)}, which this CPU lacks; "
                'run "gemm-tuner cpu" to see what it has.'
            )
        check_abi_version(f"kernel {self.sha256[:12]}", self.abi_version)

    def check_digest(self, binary: bytes) -> None:
        """Check that `binary` is this artifact.

        Raises:
            DigestMismatch: the bytes are not those that the artifact is named after.
        """
        digest = sha256(binary).hexdigest()
        if digest != self.sha256:
            raise DigestMismatch(
                f"the artifact has the sha256 {digest}, not {self.sha256}; "
                "nothing was loaded: delete the copy and fetch it again."
            )


def check_abi_version(kernel: str, version: int) -> None:
    """Check that this package calls a kernel, named in words, of a version of the ABI.

    Raises:
        AbiMismatch: it does not.
    """
    if version not in CALLED_ABI_VERSIONS:
        *others, newest = map(str, CALLED_ABI_VERSIONS)
        called = f"{', '.join(others)} and {newest}"
        raise AbiMismatch(
            f"{kernel} has version {version} of the kernel ABI, but this package calls versions "
            f"{called}; tune or resolve the problem again."
        )
