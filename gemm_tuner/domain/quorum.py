"""How the findings of several hosts become one verdict: counted, never averaged.

A host is who signs with one measuring key. Each decides by itself, by the rule for one host.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from gemm_tuner.domain.measurement import Ratio
from gemm_tuner.domain.verdict import Decision, HostFigure, Verdict

MAX_QUORUM = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one host found: of each kernel that it confirmed, by sha256, and of its own best."""

    figures: Mapping[str, HostFigure]
    best: HostFigure

    def of(self, kernel: str) -> HostFigure:
        """Return what was found of a kernel, or else of the own best."""
        return self.figures.get(kernel, self.best)


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """The kernel for which most hosts speak, and what enough of them decide of it, if they do."""

    kernel: str
    decision: Decision | None


def combine(findings: Collection[Finding], quorum: int) -> Combined | None:
    """Return the kernel for which most of `findings` speak; None if there is no finding.

    It is `tuned` if at least `quorum` hosts each decide so, and a tie, to be served, if so many
    would each serve it; else nothing is decided of it. Of kernels for which as many speak, it is
    the one whose least speed is the greatest.
    """
    found = _by_kernel(figure for finding in findings for figure in finding.figures.values())
    if not found:
        return None
    kernel = _leading(found, quorum)
    tuned, serve, _least = _rank(found[kernel], quorum)
    decision = None
    if serve >= quorum:
        decision = Decision.TUNED if tuned >= quorum else Decision.TIE
    return Combined(kernel=kernel, decision=decision)


def figures_of_leading(hosts: Collection[HostFigure], quorum: int) -> tuple[HostFigure, ...]:
    """Return the figures of the kernel for which most hosts speak; the others did not measure it.

    Of each host there is one figure: of that kernel, or else of its own best.
    """
    found = _by_kernel(hosts)
    return tuple(found[_leading(found, quorum)]) if found else ()


def lacks_hosts(verdict: Verdict) -> bool:
    """Return whether another host could bring what the quorum asks for.

    A host that measured another kernel alone is one that could.
    """
    measured = figures_of_leading(verdict.hosts, verdict.quorum)
    return verdict.is_withheld and len(measured) < verdict.quorum


def disagree(figures: Collection[HostFigure]) -> bool:
    """Return whether hosts decide otherwise, or measured other speeds of the same kernel."""
    return any(
        one.decision is not other.decision
        or (one.kernel == other.kernel and not _overlap(one.ratio, other.ratio))
        for one, other in combinations(figures, 2)
    )


def _overlap(one: Ratio, other: Ratio) -> bool:
    return one.low <= other.high and other.low <= one.high


def _by_kernel(figures: Iterable[HostFigure]) -> dict[str, list[HostFigure]]:
    found: dict[str, list[HostFigure]] = {}
    for one in figures:
        found.setdefault(one.kernel, []).append(one)
    return found


def _leading(found: Mapping[str, Collection[HostFigure]], quorum: int) -> str:
    return max(sorted(found), key=lambda kernel: _rank(found[kernel], quorum))


def _rank(figures: Collection[HostFigure], quorum: int) -> tuple[int, int, float]:
    tuned = sum(one.decision is Decision.TUNED for one in figures)
    serve = sum(one.would_serve for one in figures)
    return min(tuned, quorum), min(serve, quorum), min(one.ratio.median for one in figures)
