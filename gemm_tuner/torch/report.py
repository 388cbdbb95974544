"""What became of each layer of a model, and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from gemm_tuner.domain.printable import quoted


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """One layer: its name in the model, what it computes, and whether kernels were taken.

    `rows` are the numbers of rows that it was, or will be, called with.
    """

    name: str
    problem: str
    rows: tuple[int | str, ...]
    is_taken: bool
    reason: str

    @property
    def state(self) -> str:
        """Return in a word whether kernels were taken."""
        return "taken" if self.is_taken else "left"

    @property
    def text(self) -> str:
        """Return one line."""
        return f"{quoted(self.name)}: {self.state}: {self.problem}: {self.reason}"


class Report(Sequence[LayerReport]):
    """The layers of a model in its order; printed, a line for each, and each reason once."""

    def __init__(self, layers: Sequence[LayerReport]) -> None:
        self._layers = tuple(layers)

    def __getitem__(self, place: int) -> LayerReport:  # type: ignore[override]  # no slices
        """Return one layer."""
        return self._layers[place]

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self._layers)

    @property
    def taken(self) -> tuple[LayerReport, ...]:
        """Return the layers that call tuned kernels now."""
        return tuple(one for one in self._layers if one.is_taken)

    @property
    def left(self) -> tuple[LayerReport, ...]:
        """Return the layers that stay as they are."""
        return tuple(one for one in self._layers if not one.is_taken)

    @property
    def summary(self) -> str:
        """Return how many layers were taken."""
        if not self:
            return "no layer or product was seen"
        return f"{len(self.taken)} of {len(self)} layers call tuned kernels"

    def __str__(self) -> str:
        """Return how many layers were taken, then a line for each.

        Layers with the same reason stand below it.
        """
        groups: dict[tuple[str, str], list[LayerReport]] = {}
        for one in self._layers:
            groups.setdefault((one.state, one.reason), []).append(one)
        return "\n".join([self.summary, *chain.from_iterable(map(_lines, groups.values()))])


def _lines(alike: Sequence[LayerReport]) -> list[str]:
    """Return the lines of layers whose state and reason are the same."""
    first, *others = alike
    if not others:
        return [first.text]
    layers = [f"  {quoted(one.name)}: {one.problem}" for one in alike]
    return [f"{first.state}, {len(alike)} layers: {first.reason}", *layers]
