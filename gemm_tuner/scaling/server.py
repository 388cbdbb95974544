"""A machine to predict for: its cores by the table, and what they share."""

from dataclasses import dataclass, replace

from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.topology import Level, Plan, Topology, regular_topology
from gemm_tuner.space.cores import Core, core_of

# Until a phase is shared out by the package's pool, on two cores: measured on an EPYC 9004.
_POOL_NS = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Cores of one kind in a topology. `cpu` has their features and caches."""

    core: Core
    cpu: Cpu
    topology: Topology

    @property
    def text(self) -> str:
        """Return the core and the topology in words."""
        stands = "" if self.core.is_of(self.cpu) else ", which stands for this CPU"
        return f"{self.core.cpu.brand}{stands}: {self.topology.text}"

    def barrier_ns(self, plan: Plan) -> float:
        """Return the time until all threads have begun a phase, and all have seen its end.

        One thread waits for none. To share a phase takes the pool some time, and a line goes from
        one thread to those of its L3 group one after the other, from there to the other groups of
        the socket, and to the other sockets; and back.
        """
        if len(plan.places) == 1:
            return 0.0
        shared = self.core.shared
        ways = (
            (Level.L3_GROUP, Level.CORE, shared.group_ns),
            (Level.SOCKET, Level.L3_GROUP, shared.socket_ns),
        )
        one_way = (
            sum((_most(plan, outer, inner) - 1) * line_ns for outer, inner, line_ns in ways)
            + (len(plan.groups(Level.SOCKET)) - 1) * shared.link_ns
        )
        return _POOL_NS + 2 * one_way


def server_here(cpu: Cpu, topology: Topology) -> Server:
    """Return this machine."""
    return Server(core=core_of(cpu), cpu=cpu, topology=topology)


def server_like(core: Core, *, sockets: int = 1, cpu: Cpu | None = None) -> Server:
    """Return sockets as the table describes them, with the caches of `cpu` if it is given."""
    cores = core.cpu.physical_cores
    topology = regular_topology(
        cores=cores, sockets=sockets, cores_per_l3_group=min(cores, core.shared.group_cores)
    )
    of_cpu = cpu or core.cpu
    return Server(core=core, cpu=replace(of_cpu, physical_cores=cores * sockets), topology=topology)


def _most(plan: Plan, outer: Level, inner: Level) -> int:
    """Return how many of the smaller units threads use in the larger unit with the most."""
    return max(len({one.belongs_to(inner) for one in cpus}) for cpus in plan.groups(outer).values())
