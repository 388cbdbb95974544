"""The exceptions of gemm-tuner, one tree.

A message says what happened, with which value, and what to do. What is expected in a sweep (a
candidate that does not compile, crashes or is wrong) is an `Outcome` in a record, not an exception.

    GemmTunerError
    ├── InvalidInput                    (also a ValueError)
    │   ├── InvalidProblem
    │   ├── InvalidEpilogue
    │   ├── InvalidCandidate
    │   ├── InvalidArray
    │   ├── InvalidRecord
    │   └── InvalidSetting
    ├── MissingCapability               the machine or an installation lacks something
    │   ├── ToolchainMissing
    │   ├── BaselineMissing
    │   ├── IsaNotUsable
    │   ├── NoKernelFamily
    │   ├── NotEnoughCpus
    │   ├── NotEnoughMemory
    │   └── SandboxMissing
    ├── CompilationFailed
    ├── CompilationInterrupted
    ├── KernelRejected                  an artifact that must not be called
    │   ├── DigestMismatch
    │   ├── SignatureInvalid
    │   ├── VerdictExpired
    │   ├── NotLocked
    │   └── AbiMismatch
    ├── StoreFailed
    ├── ContributionsFull
    ├── ServiceFailed
    │   ├── ServiceUnreachable
    │   └── QuestionNotKnown
    └── TrialFailed                     the machinery around a trial broke, not the candidate
        └── PreparationStopped
"""


class GemmTunerError(Exception):
    """Every error that gemm-tuner raises on purpose."""


class InvalidInput(GemmTunerError, ValueError):
    """A value given by the caller cannot be used."""


class InvalidProblem(InvalidInput):
    """A problem's sizes, types or layout cannot be used."""


class InvalidEpilogue(InvalidInput):
    """An epilogue names an unknown step or has unusable parameters."""


class InvalidCandidate(InvalidInput):
    """A candidate's text or numbers do not describe a kernel."""


class InvalidArray(InvalidInput):
    """An array has the wrong type, shape, layout or device."""


class InvalidRecord(InvalidInput):
    """A stored or imported record does not follow the schema.

    `pointer` is a JSON pointer (RFC 6901) to the fault, empty for the record as a whole.
    """

    def __init__(self, message: str, *, pointer: str = "") -> None:
        super().__init__(message)
        self.pointer = pointer


class InvalidSetting(InvalidInput):
    """An option or environment variable has an unusable value."""


class MissingCapability(GemmTunerError):
    """The machine or the installation lacks what the call needs."""


class ToolchainMissing(MissingCapability):
    """No usable compiler was found."""


class BaselineMissing(MissingCapability):
    """A baseline library is not installed, does not load, or cannot compute a problem.

    `details` say more, one line for each way that was tried.
    """

    details: tuple[str, ...] = ()


class IsaNotUsable(MissingCapability):
    """A kernel needs CPU features that are not usable here."""


class NoKernelFamily(MissingCapability):
    """No kernel family covers the problem on this CPU."""


class NotEnoughCpus(MissingCapability):
    """More threads were to be timed than this process can run at the same time."""


class NotEnoughMemory(MissingCapability):
    """The operands of a problem do not fit into this machine."""


class SandboxMissing(MissingCapability):
    """Kernels were to be tuned only where they are shut off, and cannot be here."""


class CompilationFailed(GemmTunerError):
    """The compiler refused a generated source."""


class CompilationInterrupted(GemmTunerError):
    """The compiler was ended or could not be run: nothing is known of the source."""


class KernelRejected(GemmTunerError):
    """An artifact was not loaded because it cannot be trusted or used."""


class DigestMismatch(KernelRejected):
    """An artifact's bytes are not those its name promises."""


class SignatureInvalid(KernelRejected):
    """A verdict is unsigned, or its signature is not by a pinned key."""


class VerdictExpired(KernelRejected):
    """A signed verdict is past its expiry."""


class NotLocked(KernelRejected):
    """A lock file does not name the kernel of a problem, or not one that can be had."""


class AbiMismatch(KernelRejected):
    """An artifact was built for another version of the kernel ABI."""


class StoreFailed(GemmTunerError):
    """The database cannot be opened, read or written."""


class ContributionsFull(GemmTunerError):
    """The holder of a token contributed as much as may wait to be accepted."""


class ServiceFailed(GemmTunerError):
    """The service answered with an error; `status` is that of HTTP, 0 if there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ServiceUnreachable(ServiceFailed):
    """The service did not answer, or said that it cannot now."""


class QuestionNotKnown(ServiceFailed):
    """The service does not know a problem that this package knows: it is of another version."""


class TrialFailed(GemmTunerError):
    """The process that runs trials could not be started or broke its protocol."""


class PreparationStopped(TrialFailed):
    """Nobody waits any more for what trials need, which is not prepared yet."""
