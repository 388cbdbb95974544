"""The signed payload: the verdict in bytes, its time of issue and its expiry."""

from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import AwareDatetime, Field
from pydantic_core import to_json

from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.comparison import Comparison, Instead
from gemm_tuner.domain.context import Regime
from gemm_tuner.domain.cpu import IsaFeature
from gemm_tuner.domain.facts import artifact_facts, ratio_facts
from gemm_tuner.domain.measurement import Library, Ratio
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.verdict import Basis, Decision, Verdict
from gemm_tuner.strict_model import Sha256, StrictModel


class SignedArtifact(StrictModel):
    """The kernel that a verdict names."""

    sha256: Sha256
    size_bytes: int
    abi_version: int
    required_isa: tuple[IsaFeature, ...]
    toolchain: str
    source_sha256: Sha256

    def to_domain(self) -> Artifact:
        """Return the artifact."""
        return Artifact(
            sha256=self.sha256,
            size_bytes=self.size_bytes,
            abi_version=self.abi_version,
            required_isa=frozenset(self.required_isa),
            toolchain=self.toolchain,
            source_sha256=self.source_sha256,
        )


class SignedRatio(StrictModel):
    """The speed of the kernel over that of the baseline."""

    median: float
    low: float
    high: float
    of_minimums: float

    def to_domain(self) -> Ratio:
        """Return the ratio."""
        return Ratio(median=self.median, low=self.low, high=self.high, of_minimums=self.of_minimums)


class SignedLibrary(StrictModel):
    """The library that a kernel was compared with."""

    text: str
    package: str

    def to_domain(self) -> Library:
        """Return the library."""
        return Library(text=self.text, package=self.package)


class SignedInstead(StrictModel):
    """The library that runs where no kernel is served, and its speed over the baseline's."""

    library: SignedLibrary
    speed: Annotated[float, Field(gt=0)]

    def to_domain(self) -> Instead:
        """Return the library with its speed."""
        return Instead(library=self.library.to_domain(), speed=self.speed)


class VerdictPayload(StrictModel):
    """A verdict as it is signed. `problem` and `candidate` are text forms.

    `serial` grows with what the service knows: of two verdicts for the same question, the one with
    the earlier day of issue, or of one day with the smaller serial, is the older.
    """

    problem: str
    cpu_key: str
    threads: int
    regime: Regime
    decision: Decision
    basis: Basis
    complete: bool
    candidate: str | None
    ratio: SignedRatio | None
    compared_with: SignedLibrary | None = None  # not in answers of older services
    instead: SignedInstead | None = None  # as well
    artifact: SignedArtifact | None
    issued_at: AwareDatetime
    expires_at: AwareDatetime
    serial: Annotated[int, Field(ge=0)]

    @classmethod
    def of(
        cls, verdict: Verdict, *, issued_at: datetime, expires_at: datetime, serial: int
    ) -> Self:
        """Return the payload of `verdict`."""
        dates = date_members(issued_at=issued_at, expires_at=expires_at)
        facts = {**payload_facts(verdict), **dates, "serial": serial}
        return cls.model_validate_json(to_json(facts))

    @property
    def comparison(self) -> Comparison | None:
        """Return the speed beside the baseline and beside what runs instead, if measured."""
        if self.ratio is None or self.compared_with is None:
            return None
        return Comparison(
            ratio=self.ratio.to_domain(),
            baseline=self.compared_with.to_domain(),
            instead=self.instead.to_domain() if self.instead else None,
            is_fixed=Problem.parse(self.problem).is_fixed,
        )

    @property
    def age(self) -> tuple[datetime, int]:
        """Return the age as a key: an older verdict for the same question has a smaller one."""
        return (self.issued_at, self.serial)


def payload_facts(verdict: Verdict) -> dict[str, Any]:
    """Return the members of the `VerdictPayload` of a verdict, as JSON has them.

    Its dates and its serial are left out. No model is made of them: that took as long as to sign.
    """
    comparison = verdict.comparison
    return {
        "problem": verdict.problem.text,
        "cpu_key": verdict.cpu_key,
        "threads": verdict.context.threads,
        "regime": verdict.context.regime,
        "decision": verdict.decision,
        "basis": verdict.basis,
        "complete": verdict.complete,
        "candidate": verdict.candidate.text if verdict.candidate else None,
        "ratio": ratio_facts(comparison.ratio) if comparison else None,
        "compared_with": _library_facts(comparison.baseline) if comparison else None,
        "instead": _instead_facts(comparison.instead) if comparison else None,
        "artifact": artifact_facts(verdict.artifact) if verdict.artifact else None,
    }


def date_members(*, issued_at: datetime, expires_at: datetime) -> dict[str, str]:
    """Return the members of a `VerdictPayload` that say from when to when it holds."""
    return {"issued_at": _time_text(issued_at), "expires_at": _time_text(expires_at)}


def _library_facts(library: Library) -> dict[str, str]:
    return {"text": library.text, "package": library.package}


def _instead_facts(instead: Instead | None) -> dict[str, Any] | None:
    if instead is None:
        return None
    return {"library": _library_facts(instead.library), "speed": instead.speed}


def _time_text(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
