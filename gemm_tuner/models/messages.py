"""What the process of a way is asked, and what it answers: a line of JSON each."""

from dataclasses import dataclass

from pydantic import TypeAdapter

from gemm_tuner.domain.model_run import LayerCalls, TimeShares


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process prepares. With `budget_s`, it only tunes what the database lacks."""

    model: str
    way: str
    dtype: str
    threads: int
    batch: int
    is_small: bool
    db: str
    budget_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A way can be timed: how far its outputs are from those in f32, and what became of layers.

    `agreement` is the share of rows whose largest element is where it is in f32.
    `wrong` says why they are not those of the model. `resident_bytes` is the memory of its process.
    """

    error: float
    agreement: float
    call_s: float
    wrong: str = ""
    resident_bytes: int = 0
    taken: int | None = None
    left: int | None = None
    why_left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The median time of some calls, and what the process used and waited for meanwhile."""

    call_ns: int
    is_disturbed: bool
    used_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """Where the time goes, and the layers of the model; None where it is not PyTorch's to say."""

    shares: TimeShares | None = None
    layers: tuple[LayerCalls, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One of these, or the reason why the way failed."""

    ready: Ready | None = None
    sampled: Sampled | None = None
    looked: Looked | None = None
    failed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """After an order: time so many `calls`, or if there are none, look where the time goes."""

    calls: int = 0


ORDER: TypeAdapter[Order] = TypeAdapter(Order)
ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)
QUESTION: TypeAdapter[Question] = TypeAdapter(Question)
