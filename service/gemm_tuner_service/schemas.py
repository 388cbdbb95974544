"""What requests and answers look like."""

import re
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Caches, Cpu, parse_isa
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.revocation import MAX_REASON
from gemm_tuner.domain.sandbox import SandboxLevel
from gemm_tuner.domain.verdict import Basis, Decision
from gemm_tuner.store.contributions import Contribution, Kind
from gemm_tuner.store.wire.record import WireRecord
from gemm_tuner.trust.signature import SignedVerdict
from gemm_tuner.trust.succession import Succession
from gemm_tuner_service.bounds import MAX_BATCH, MAX_FAULTS
from gemm_tuner_service.problems import ProblemDocument

_DIGITS = re.compile(r"-?[0-9]+")


def _check_digits(value: object) -> object:
    if isinstance(value, str) and not _DIGITS.fullmatch(value):
        raise ValueError("write a number in digits alone")
    return value


def _number_to_text(value: object) -> object:
    return str(value) if type(value) is int else value


Text = Annotated[str, Field(max_length=1000)]
OperationText = Annotated[
    str,
    Field(
        max_length=32,
        description="`linear`, whose w is constant, `matmul`, a product of two activations, or "
        "`attention` of m queries, n keys and values, and heads of k elements",
    ),
]
ReductionText = Annotated[
    str,
    Field(
        max_length=32,
        description="`any` order of additions, or `fixed`: the same bits from every kernel",
    ),
]
# Of a number in a query, which pydantic would take from more texts, such as 1_0.
IN_DIGITS = BeforeValidator(_check_digits)
Integer = Annotated[int, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Rows = Annotated[
    str,
    BeforeValidator(_number_to_text, json_schema_input_type=int | str),
    Field(max_length=32, description="a number, or a range such as 1..64"),
]
Columns = Annotated[
    str,
    BeforeValidator(_number_to_text, json_schema_input_type=int | str),
    Field(max_length=32, description="a number; of attention keys, or a range such as 1..4096"),
]


def _check_printable(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("write it in one line, of characters that can be seen")
    return text


Reason = Annotated[
    str,
    AfterValidator(_check_printable),
    Field(max_length=MAX_REASON, description="why, in one line, for whoever asks for it"),
]


class RequestModel(BaseModel):
    """The parent of what callers send: a name that is not known is a fault."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_that_members_are_few(cls, value: object) -> object:
        # Each that is not known would be a fault of its own: 100,000 of them in one request.
        if isinstance(value, dict) and len(value) > MAX_FAULTS:
            raise ValueError(f"there are {len(value)} members; none has more than {MAX_FAULTS}")
        return value


class KernelQuery(RequestModel):
    """The query of `GET /v1/kernels`.

    `cpu` is the exact key of a CPU in the store; without it the service's own CPU is meant. `isa`
    names the only features that may be used, joined by commas.
    """

    m: Rows
    n: Columns
    k: Annotated[int, IN_DIGITS]
    dtype: Text = "f32"
    epilogue: Text = "none"
    w_layout: Text = "nk"
    reduction: ReductionText = "any"
    operation: OperationText = "linear"
    cpu: Text | None = None
    isa: Text | None = None
    threads: Annotated[int, IN_DIGITS] = 1
    regime: Regime = Regime.HOT

    def to_problem(self) -> Problem:
        """Return the problem asked for; a `+` that was decoded to a space is read as a `+`."""
        return Problem.create(
            self.m,
            self.n,
            self.k,
            dtype=self.dtype,
            w_layout=self.w_layout,
            reduction=self.reduction,
            operation=self.operation,
            epilogue="+".join(self.epilogue.replace("+", " ").split()),
        )


class CachesDescription(RequestModel):
    """Sizes of the data caches."""

    l1d_bytes: Count = 0
    l2_bytes: Count = 0
    l3_bytes: Count = 0


class CpuDescription(RequestModel):
    """A CPU and the features usable on it; features that gemm-tuner does not use are ignored."""

    vendor: Annotated[str, Field(pattern=r"^[A-Za-z0-9_. -]{1,64}$")]
    brand: Text = ""
    family: Annotated[Count, Field(lt=2**31)]
    model: Annotated[Count, Field(lt=2**31)]
    stepping: Annotated[Count, Field(lt=2**31)]
    isa: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=1000)]
    caches: CachesDescription = CachesDescription()
    physical_cores: Annotated[Count, Field(ge=1)] = 1

    def to_domain(self) -> Cpu:
        """Return the CPU."""
        return Cpu(
            vendor=self.vendor,
            brand=self.brand,
            family=self.family,
            model=self.model,
            stepping=self.stepping,
            isa=parse_isa(self.isa),
            caches=Caches(
                l1d_bytes=self.caches.l1d_bytes,
                l2_bytes=self.caches.l2_bytes,
                l3_bytes=self.caches.l3_bytes,
            ),
            physical_cores=self.physical_cores,
        )


class ContextFields(RequestModel):
    """Where a kernel is to run; without `cpu` the service's own CPU is meant."""

    cpu: CpuDescription | None = None
    threads: Integer = 1
    regime: Regime = Regime.HOT

    def to_context(self) -> ExecutionContext:
        """Return the context asked for."""
        return ExecutionContext(threads=self.threads, regime=self.regime)


class ResolveRequest(ContextFields):
    """The problem as text, such as `f32 128x3072x768 nk bias+gelu_erf`, or as m, n and k.

    A last word `fixed` of the text is the `reduction` of the fields, a first word `matmul` the
    `operation`.
    """

    problem: Text | None = None
    m: Rows | None = None
    n: Columns | None = None
    k: Integer | None = None
    dtype: Text = "f32"
    epilogue: Text = "none"
    w_layout: Text = "nk"
    reduction: ReductionText = "any"
    operation: OperationText = "linear"

    @model_validator(mode="after")
    def _check_that_one_form_is_used(self) -> Self:
        text_alone = self.problem is not None and not self.model_fields_set & {
            "m", "n", "k", "dtype", "epilogue", "w_layout", "reduction", "operation"
        }  # fmt: skip
        fields_alone = self.problem is None and None not in (self.m, self.n, self.k)
        if not (text_alone or fields_alone):
            raise ValueError("give either problem, or m, n and k")
        return self

    def to_problem(self) -> Problem:
        """Return the problem asked for."""
        if self.problem is not None:
            return Problem.parse(self.problem)
        assert self.m is not None
        assert self.n is not None
        assert self.k is not None
        return Problem.create(
            self.m,
            self.n,
            self.k,
            dtype=self.dtype,
            w_layout=self.w_layout,
            reduction=self.reduction,
            operation=self.operation,
            epilogue=self.epilogue,
        )


class BatchRequest(ContextFields):
    """Many problems, as text, for one CPU and context.

    With `max_loss` they are one layer for several m, whose kernels are to read as few packed copies
    of the weights as they can: each may lose this share of its speed, such as 0.02.
    """

    problems: Annotated[list[Text], Field(min_length=1, max_length=MAX_BATCH)]
    max_loss: Annotated[float | None, Field(ge=0, lt=1)] = None


class ArtifactView(BaseModel):
    """Where a kernel binary and its source are, and what is needed to run it."""

    url: str
    source_url: str
    sha256: str
    size_bytes: int
    abi_version: int
    required_isa: list[str]
    toolchain: str
    source_sha256: str


class MeasurementView(BaseModel):
    """Times of one call, and the speed over the baseline with its 95 % interval."""

    candidate_median_ns: float
    baseline: str
    baseline_median_ns: float
    speed_ratio: float
    speed_ratio_low: float
    speed_ratio_high: float


class VerdictView(BaseModel):
    """Who should run the problem, and why.

    A `candidate` and its `measurement` without an `artifact` say that the kernel was not
    shown to be as fast as the baseline. `doubt` says why the measurement decides nothing, where
    something else than the kernel and the baseline decided it. `attested_by` is the id of the
    measuring key that attests the artifact.
    """

    problem: str
    cpu_key: str
    threads: int
    regime: Regime
    decision: Decision
    basis: Basis
    complete: bool
    candidate: str | None
    measurement: MeasurementView | None
    artifact: ArtifactView | None
    doubt: str | None = None
    attested_by: str | None = None


class Resolution(BaseModel):
    """The answer to one question: signed for programs, readable for people, and explained."""

    signed: SignedVerdict
    verdict: VerdictView
    explain: list[str]


class BatchItem(BaseModel):
    """The answer to one problem of a batch: a resolution, or the error it met."""

    problem: str
    resolution: Resolution | None = None
    error: ProblemDocument | None = None


class BatchResolution(BaseModel):
    """The answers to a batch, in the order of its problems."""

    results: list[BatchItem]


class RecordsPage(BaseModel):
    """Some records in the order they were made; `next_cursor` asks for those after them."""

    records: list[WireRecord]
    next_cursor: int | None


class RecordsReceipt(BaseModel):
    """What became of records that were contributed: how many were new, and how many known."""

    added: int
    known: int


class RevocationRequest(RequestModel):
    """Why something is revoked, for whoever asks for it."""

    reason: Reason


class ContributionView(BaseModel):
    """Something that the caller contributed, by the sha256 of its bytes."""

    kind: Kind
    sha256: str
    size_bytes: int

    @classmethod
    def of(cls, contribution: Contribution) -> Self:
        """Return the view of `contribution`."""
        return cls(
            kind=contribution.kind,
            sha256=contribution.sha256,
            size_bytes=contribution.size_bytes,
        )


class ContributionsPage(BaseModel):
    """What the caller contributed; `next_cursor` asks for what follows."""

    contributions: list[ContributionView]
    next_cursor: int | None


class PublicKeyView(BaseModel):
    """A key that signs verdicts: 32 raw bytes in base64."""

    key_id: str
    algorithm: str = "ed25519"
    public_key: str


class PublicKeys(BaseModel):
    """The keys that sign verdicts now, to be pinned by clients, and how they came from others."""

    keys: list[PublicKeyView]
    successions: list[Succession] = []


class Health(BaseModel):
    """Whether the service works."""

    status: str


class Version(BaseModel):
    """What is running."""

    gemm_tuner: str
    api: str
    abi_version: int
    sandbox: SandboxLevel
