"""How often the rule that ends a final early lets go of a kernel that is as fast as any in it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.record import Stage
from gemm_tuner.replay.recorded_trials import first_rounds, is_behind
from gemm_tuner.replay.recording import Recording, Series
from gemm_tuner.replay.replaying import is_near_best
from gemm_tuner.replay.samples import Samples
from gemm_tuner.tuning.sampling import how_to_end


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Kernels within 2 % of the fastest beside them took part in finals so often, and `left`."""

    took_part: int
    left: int

    @property
    def share(self) -> float:
        """Return the error probability of the rule, by what was recorded."""
        return self.left / self.took_part if self.took_part else 0.0


def leaving(recordings: Iterable[Recording]) -> Leaving:
    """Return how often kernels that should stay would leave a final, by recorded samples.

    How fast they are is the median of all that was recorded of them. A final has as many rounds
    of each request as one of a sweep has in a process.
    """
    left = [
        is_behind(least_ns, min(of_all.values()))
        for recording in recordings
        for near, of_all in _first_rounds_of_finals(recording)
        for candidate, least_ns in of_all.items()
        if candidate in near
    ]
    return Leaving(took_part=len(left), left=sum(left))


def _first_rounds_of_finals(
    recording: Recording,
) -> Iterator[tuple[set[Candidate], dict[Candidate, float]]]:
    """Yield, of each final, who is near the fastest, and the least time of a call of all, in ns."""
    speeds = Samples(recording).speeds()
    candidates = [one.candidate for one in recording.candidates]
    pairs = how_to_end(0.0).pairs
    for request in recording.requests:
        if request.stage is not Stage.FINAL:
            continue
        present = [candidates[place] for place in request.candidates]
        together = dict(zip(present, request.series, strict=True))
        fastest = max(speeds[one] for one in together)
        near = {one for one in together if is_near_best(1 - speeds[one] / fastest)}
        first = first_rounds(pairs)
        for begin in range(0, len(request.baseline.elapsed_ns) - first + 1, pairs):
            yield near, {one: _least_ns(of, begin, first) for one, of in together.items()}


def _least_ns(series: Series, begin: int, rounds: int) -> float:
    return min(series.elapsed_ns[begin : begin + rounds]) / series.calls
