"""The JSON form of a record: how trials are stored, exchanged and served.

The models check what comes from outside; `dump_record` and `parse_record` turn a trial into its
canonical JSON and back.
"""

from datetime import UTC
from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, Field, ValidationError, model_validator

from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.candidate import MAX_CHARACTERS, Candidate
from gemm_tuner.domain.canonical import canonical_json, json_pointer
from gemm_tuner.domain.context import MAX_THREADS, ExecutionContext, Regime
from gemm_tuner.domain.cpu import Caches, Cpu, IsaFeature
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.recipe import Recipe
from gemm_tuner.domain.record import Conditions, Outcome, Stage, Trial
from gemm_tuner.domain.sandbox import SandboxLevel
from gemm_tuner.errors import InvalidInput, InvalidRecord
from gemm_tuner.store.wire.measurement import WireMeasurement
from gemm_tuner.store.wire.members import Bytes, Line, Number
from gemm_tuner.strict_model import Sha256, StrictModel

MAX_DETAIL = 20_000

Vendor = Annotated[str, Field(pattern=r"^[A-Za-z0-9_. -]{1,64}$")]
Isa = tuple[IsaFeature, ...]
Flags = Annotated[tuple[Line, ...], Field(max_length=100)]


class WireCaches(StrictModel):
    """Sizes of the data caches."""

    l1d_bytes: Bytes
    l2_bytes: Bytes
    l3_bytes: Bytes


class WireCpu(StrictModel):
    """A CPU with the features usable on it."""

    vendor: Vendor
    brand: Line
    family: Number
    model: Number
    stepping: Number
    isa: Isa
    caches: WireCaches
    physical_cores: Annotated[int, Field(ge=1, lt=2**20)]

    @classmethod
    def of(cls, cpu: Cpu) -> Self:
        """Return the JSON form of `cpu`."""
        return cls(
            vendor=cpu.vendor,
            brand=cpu.brand,
            family=cpu.family,
            model=cpu.model,
            stepping=cpu.stepping,
            isa=tuple(sorted(cpu.isa)),
            caches=WireCaches(
                l1d_bytes=cpu.caches.l1d_bytes,
                l2_bytes=cpu.caches.l2_bytes,
                l3_bytes=cpu.caches.l3_bytes,
            ),
            physical_cores=cpu.physical_cores,
        )

    def to_domain(self) -> Cpu:
        """Return the CPU."""
        return Cpu(
            vendor=self.vendor,
            brand=self.brand,
            family=self.family,
            model=self.model,
            stepping=self.stepping,
            isa=frozenset(self.isa),
            caches=Caches(
                l1d_bytes=self.caches.l1d_bytes,
                l2_bytes=self.caches.l2_bytes,
                l3_bytes=self.caches.l3_bytes,
            ),
            physical_cores=self.physical_cores,
        )


class WireArtifact(StrictModel):
    """What is known of a kernel binary."""

    sha256: Sha256
    size_bytes: Bytes
    abi_version: Number
    required_isa: Isa
    toolchain: Line
    source_sha256: Sha256
    # Left out where it is empty, so that records without it stay what they are.
    flags: Annotated[Flags, Field(exclude_if=lambda flags: not flags)] = ()

    @classmethod
    def of(cls, artifact: Artifact) -> Self:
        """Return the JSON form of `artifact`."""
        return cls(
            sha256=artifact.sha256,
            size_bytes=artifact.size_bytes,
            abi_version=artifact.abi_version,
            required_isa=tuple(sorted(artifact.required_isa)),
            toolchain=artifact.toolchain,
            source_sha256=artifact.source_sha256,
            flags=artifact.flags,
        )

    def to_domain(self) -> Artifact:
        """Return the artifact."""
        return Artifact(
            sha256=self.sha256,
            size_bytes=self.size_bytes,
            abi_version=self.abi_version,
            required_isa=frozenset(self.required_isa),
            toolchain=self.toolchain,
            source_sha256=self.source_sha256,
            flags=self.flags,
        )


class WireRefused(StrictModel):
    """What a compiler refused."""

    source_sha256: Sha256
    flags: Flags

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """Return the JSON form of `recipe`; the record names the compiler."""
        return cls(source_sha256=recipe.source_sha256, flags=recipe.flags)

    def to_domain(self, toolchain: str) -> Recipe:
        """Return the recipe."""
        return Recipe(source_sha256=self.source_sha256, toolchain=toolchain, flags=self.flags)


class WireConditions(StrictModel):
    """What surrounded a measurement."""

    peak_flop_per_s: Annotated[float, Field(ge=0)]
    noise: Annotated[float, Field(ge=0)]
    huge_pages: Line
    kernel_release: Line
    microcode: Line
    # Left out where it is empty, so that records without it stay what they are.
    topology: Annotated[Line, Field(exclude_if=lambda text: not text)] = ""
    sandbox: Annotated[SandboxLevel | None, Field(exclude_if=lambda level: level is None)] = None

    @classmethod
    def of(cls, conditions: Conditions) -> Self:
        """Return the JSON form of `conditions`."""
        return cls(
            peak_flop_per_s=conditions.peak_flop_per_s,
            noise=conditions.noise,
            huge_pages=conditions.huge_pages,
            kernel_release=conditions.kernel_release,
            microcode=conditions.microcode,
            topology=conditions.topology,
            sandbox=conditions.sandbox,
        )

    def to_domain(self) -> Conditions:
        """Return the conditions."""
        return Conditions(
            peak_flop_per_s=self.peak_flop_per_s,
            noise=self.noise,
            huge_pages=self.huge_pages,
            kernel_release=self.kernel_release,
            microcode=self.microcode,
            topology=self.topology,
            sandbox=self.sandbox,
        )


class WireRecord(StrictModel):
    """One trial. `format` is raised when an older reader could misunderstand a record."""

    format: Literal[1] = 1
    created_at: AwareDatetime
    problem: Line
    cpu: WireCpu
    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)]
    regime: Regime
    candidate: Annotated[str, Field(max_length=MAX_CHARACTERS)]
    toolchain: Line
    # Kept in a column, and PostgreSQL has no NUL in its texts.
    generator: Annotated[str, Field(max_length=128, pattern=r"^[^\x00]*$")]
    stage: Stage
    outcome: Outcome
    detail: Annotated[str, Field(max_length=MAX_DETAIL)] = ""
    # Left out where it is empty, so that records without it stay what they are.
    emulated: Annotated[Isa, Field(exclude_if=lambda features: not features)] = ()
    artifact: WireArtifact | None = None
    refused: Annotated[WireRefused | None, Field(exclude_if=lambda recipe: recipe is None)] = None
    measurement: WireMeasurement | None = None
    conditions: WireConditions | None = None
    usable_cpus: Annotated[
        int | None, Field(ge=1, lt=2**20, exclude_if=lambda cpus: cpus is None)
    ] = None

    @model_validator(mode="after")
    def _check_that_what_was_timed_was_verified(self) -> Self:
        if self.measurement and self.outcome is not Outcome.CORRECT:
            raise ValueError(f"a measurement needs the outcome correct, not {self.outcome.value}")
        return self

    @model_validator(mode="after")
    def _check_that_nothing_emulated_was_timed(self) -> Self:
        if self.measurement and self.emulated:
            raise ValueError("a measurement cannot be of emulated features")
        return self

    @classmethod
    def of(cls, trial: Trial) -> Self:
        """Return the JSON form of `trial`."""
        return cls(
            created_at=trial.created_at.astimezone(UTC),
            problem=trial.problem.text,
            cpu=WireCpu.of(trial.cpu),
            threads=trial.context.threads,
            regime=trial.context.regime,
            candidate=trial.candidate.text,
            toolchain=trial.toolchain,
            generator=trial.generator,
            stage=trial.stage,
            outcome=trial.outcome,
            detail=trial.detail[:MAX_DETAIL],
            emulated=tuple(sorted(trial.emulated)),
            artifact=WireArtifact.of(trial.artifact) if trial.artifact else None,
            refused=WireRefused.of(trial.refused) if trial.refused else None,
            measurement=WireMeasurement.of(trial.measurement) if trial.measurement else None,
            conditions=WireConditions.of(trial.conditions) if trial.conditions else None,
            usable_cpus=trial.usable_cpus,
        )

    def to_domain(self) -> Trial:
        """Return the trial.

        Raises:
            InvalidInput: a text form in the record is not understood.
            InvalidSetting: the regime has cold weights, and w is an activation.
            OverflowError: the date is not one of the calendar in UTC.
        """
        problem = Problem.parse(self.problem)
        problem.check_regimes(self.regime)
        return Trial(
            created_at=self.created_at.astimezone(UTC),
            problem=problem,
            cpu=self.cpu.to_domain(),
            context=ExecutionContext(threads=self.threads, regime=self.regime),
            candidate=Candidate.parse(self.candidate),
            toolchain=self.toolchain,
            generator=self.generator,
            stage=self.stage,
            outcome=self.outcome,
            detail=self.detail,
            emulated=frozenset(self.emulated),
            artifact=self.artifact.to_domain() if self.artifact else None,
            refused=self.refused.to_domain(self.toolchain) if self.refused else None,
            measurement=self.measurement.to_domain() if self.measurement else None,
            conditions=self.conditions.to_domain() if self.conditions else None,
            usable_cpus=self.usable_cpus,
        )


def dump_record(trial: Trial) -> str:
    """Return the canonical JSON of `trial`, on one line; a very long `detail` is cut.

    Raises:
        InvalidRecord: a value of `trial` does not fit the schema.
    """
    try:
        return canonical_json(WireRecord.of(trial).model_dump(mode="json"))
    except ValidationError as error:
        raise _invalid_record(error) from None


def parse_record(document: str | bytes) -> Trial:
    """Return the trial written as JSON.

    Raises:
        InvalidRecord: `document` is not JSON, or does not follow the schema.
    """
    try:
        return WireRecord.model_validate_json(document).to_domain()
    except ValidationError as error:
        raise _invalid_record(error) from None
    except InvalidInput as error:
        raise InvalidRecord(str(error)) from None
    except OverflowError:
        raise InvalidRecord("created_at: the date is out of range in UTC; correct it.") from None


def record_schema() -> dict[str, Any]:
    """Return the JSON Schema of a record, as committed in tuning_db/record.schema.json."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **WireRecord.model_json_schema(),
        "title": "gemm-tuner record",
    }


def _invalid_record(error: ValidationError) -> InvalidRecord:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "record"
    return InvalidRecord(
        f"{place}: {first['msg']}; see tuning_db/record.schema.json for the form of a record.",
        pointer="" if first["type"] == "json_invalid" else json_pointer(first["loc"]),
    )
