"""What the rows of models and of ways to run them are made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model with random weights, ready for inference, and what it is called with, by name.

    It returns a tensor, or a tuple of them.
    """

    module: Any
    inputs: Mapping[str, Any]

    def call(self) -> Any:  # noqa: ANN401 - tensors
        """Call the model."""
        return self.module(**self.inputs)


class Build(Protocol):
    """Makes a model in the process of a way; `is_small` asks for a layer or two of few weights."""

    def __call__(self, batch: int, *, is_small: bool) -> Built:
        """Return the model in f32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A row of the table of models; `text` says what it computes."""

    name: str
    text: str
    build: Build


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A type of numbers that a model is run in.

    Its linear layers have operands of `types`, and weights in the layout that `w_layout` says for n
    and k, as a problem names them; all else is in `other`, and so are layers that have no layout.
    A way counts with a distance of its outputs from those in f32 (see `correctness`) of at most
    `tolerance`, or `times_own` the distance of PyTorch's eager mode in this type. `convert` makes
    of a model in f32 one that PyTorch runs so, and `program` one for packages that read what
    torch.export writes; without it, they convert the model in f32. `needs` is the package that
    `convert` is of, and `install` the command that installs it.
    """

    name: str
    types: str
    w_layout: Callable[[int, int], str | None] = lambda _n, _k: "nk"
    other: str
    tolerance: float
    times_own: float = 0.0
    convert: Callable[[Built], Built]
    program: Callable[[Built], Any] | None = None
    needs: str = ""
    install: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a way is to run: the model as PyTorch runs it in the precision.

    `plain` makes it in f32, for those that convert models by themselves. With `budget_s`, what the
    database `db` lacks is tuned first, so long for each layer.
    """

    built: Built
    plain: Callable[[], Built]
    precision: Precision
    threads: int
    db: str
    budget_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model that can be timed.

    `call` computes once. `outputs` returns what a call returned as a list of tensors. `plain` is
    the model under PyTorch, if it is, whose products can be collected. `report` returns what became
    of each layer, of our ways.
    """

    call: Callable[[], Any]
    outputs: Callable[[Any], Sequence[Any]]
    plain: Built | None = None
    report: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A row of the table of ways to run a model.

    `wheel` is the package that it is of, and `install` the command that installs it. `prepare` runs
    in a process of its own. `settings` are how it is asked, for the record. `unable` says, by the
    name of a precision, why it cannot run it.
    """

    name: str
    wheel: str
    prepare: Callable[[Work], Prepared]
    install: str = 'pip install "gemm-tuner[torch]"'
    also_needs: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    unable: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = False


def tensors_of(output: Any) -> list[Any]:  # noqa: ANN401 - a tensor or several
    """Return what a model of PyTorch returned as a list."""
    return list(output) if isinstance(output, tuple | list) else [output]
