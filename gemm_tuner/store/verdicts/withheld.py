"""Kernels that a quorum holds back: which hosts found them, and so who should measure next.

This decides who is asked, never what is served, so stored verdicts are read as they are.
"""

from dataclasses import dataclass

from sqlalchemy import Connection, select

from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.quorum import figures_of_leading
from gemm_tuner.domain.verdict import Basis, HostFigure, Verdict
from gemm_tuner.errors import StoreFailed
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.reading import usable_keys
from gemm_tuner.store.sql.statements import Statements
from gemm_tuner.store.sql.tables import verdicts
from gemm_tuner.store.wire.verdict import load_verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Withheld:
    """What hosts of a class found of a problem, so many of which are needed as the quorum says.

    There are none where a kernel is named, or where no host would serve one. Only those count whose
    measuring keys are `believed`.
    """

    hosts: tuple[HostFigure, ...] = ()
    believed: frozenset[str] = frozenset()
    quorum: int = 1

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys of those that measured the kernel for which most speak, in hex."""
        hosts = [one for one in self.hosts if one.key in self.believed]
        return frozenset(one.key for one in figures_of_leading(hosts, self.quorum))

    @property
    def lacks_hosts(self) -> bool:
        """Return whether another host could bring what the quorum asks for."""
        return 0 < len(self.keys) < self.quorum

    @property
    def text(self) -> str:
        """Return how many hosts measured, of how many that are needed; empty if that is no matter.

        It is a clause.
        """
        count = len(self.keys)
        return f"measured on {count} of {self.quorum} hosts" if self.lacks_hosts else ""


class WithheldKernels(Statements):
    """The kernels of one database that a quorum holds back."""

    def withheld(self, problem: Problem, *, class_key: str, context: ExecutionContext) -> Withheld:
        """Return what hosts found of a problem on CPUs of a class, if its kernel is held back."""
        with usable_keys():
            believed = self._keys.believed()
        with self._reading() as connection:
            return _read(connection, problem, class_key, context, believed)

    def has_measured(self, withheld: Withheld) -> bool:
        """Return whether this host is one of those that found it."""
        return self._keys.own_made() in withheld.keys

    def found_by_others(self, withheld: Withheld) -> tuple[Candidate, ...]:
        """Return what other hosts would serve: one more that finds it brings the quorum nearer."""
        own = self._keys.own_made()
        found = (one for one in withheld.hosts if one.would_serve and one.key != own)
        return tuple(map(Candidate.parse, dict.fromkeys(one.candidate for one in found)))


def _read(
    connection: Connection,
    problem: Problem,
    class_key: str,
    context: ExecutionContext,
    believed: frozenset[str],
) -> Withheld:
    row = verdicts.c
    query = select(row.cpu_key, row.document).where(
        row.problem_id == problem_id(problem),
        row.class_key == class_key,
        row.threads == context.threads,
        row.regime == context.regime.value,
        row.document.is_not(None),
    )
    hosts: dict[str, HostFigure] = {}
    quorum = 1
    for cpu_key, document in connection.execute(query):
        try:
            verdict, _keys = load_verdict(
                document, problem=problem, cpu_key=cpu_key, context=context, basis=Basis.MEASURED
            )
        except StoreFailed:  # damaged: whoever tunes the problem makes another
            continue
        if _is_named(verdict, believed):
            return Withheld()
        if verdict.quorum > 1 and any(one.would_serve for one in verdict.hosts):
            hosts |= {one.key: one for one in verdict.hosts}
            quorum = verdict.quorum
    return Withheld(hosts=tuple(hosts.values()), believed=believed, quorum=quorum)


def _is_named(verdict: Verdict, believed: frozenset[str]) -> bool:
    """Return whether a verdict names a kernel, and still would: keys may be forgotten since."""
    if verdict.artifact is None or verdict.quorum == 1:
        return verdict.artifact is not None
    kernel = verdict.artifact.sha256
    for_it = [one for one in verdict.hosts if one.kernel == kernel and one.would_serve]
    return sum(one.key in believed for one in for_it) >= verdict.quorum
