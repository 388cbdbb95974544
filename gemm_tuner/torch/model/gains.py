"""What a model gains by tuned kernels, layer by layer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGain:
    """Layers of a model that compute the same, and their time in all calls of it, in seconds.

    `tuned_s` is None where no kernel was timed in the model. `is_served` says whether `replace`
    finds the kernel that was taken; where it does not, `tune_model` finds it among the trials.
    """

    names: tuple[str, ...]
    problem: str
    share: float
    plain_s: float
    tuned_s: float | None
    is_taken: bool
    reason: str
    is_served: bool = False

    @property
    def speedup(self) -> float | None:
        """Return how many times as fast they are with kernels, None where none was timed."""
        return self.plain_s / self.tuned_s if self.tuned_s and self.plain_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGain:
    """What a model gains by the kernels that its layers call now: seconds of all its calls.

    The two times are medians of rounds in alternation, `speedup` that of their ratios. `layers` are
    those that take the longest first; printed, a line for each.
    """

    plain_s: float
    tuned_s: float
    speedup: float
    layers: tuple[LayerGain, ...]

    def __str__(self) -> str:
        """Return a table."""
        before, now = (f"{seconds * 1e3:.4g} ms" for seconds in (self.plain_s, self.tuned_s))
        lines = [f"{before}, with tuned kernels {now}: {self.speedup:.3f} times as fast"]
        for one in self.layers:
            speed = "" if one.speedup is None else f", {one.speedup:.3f} times"
            more = f" and {len(one.names) - 1} more" if len(one.names) > 1 else ""
            state = "taken" if one.is_taken else "left"
            lines.append(
                f"{one.share:6.1%}{speed}  {one.problem}  {one.names[0]}{more}: {state}: "
                f"{one.reason}"
            )
        return "\n".join(lines)
