"""The CPUs that a process may use, what they share, and which of them some threads take."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from gemm_tuner.domain.units import counted
from gemm_tuner.errors import InvalidRecord, InvalidSetting, NotEnoughCpus


class Level(StrEnum):
    """What CPUs may have in common, from the smallest to the largest."""

    CORE = "core"  # hyper-threads of one core
    L3_GROUP = "l3_group"
    NODE = "node"  # of NUMA: memory at the same distance
    SOCKET = "socket"


_NAMES = {
    Level.SOCKET: "socket",
    Level.NODE: "NUMA node",
    Level.L3_GROUP: "L3 group",
    Level.CORE: "core",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """A CPU as the system numbers it, and what it belongs to.

    Core and L3 group are named by their lowest CPU, node and socket by their number.
    """

    number: int
    core: int
    l3_group: int
    node: int
    socket: int

    def belongs_to(self, level: Level) -> int:
        """Return the core, L3 group, node or socket that this CPU is in."""
        found: int = getattr(self, level.value)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The CPUs that a process may use; of their time, `quota_cpus` if it is limited."""

    processors: tuple[Processor, ...]
    quota_cpus: int | None = None

    def __post_init__(self) -> None:
        """Check that there is a CPU."""
        if not self.processors:
            raise InvalidRecord("a machine without a usable CPU cannot compute.")

    @property
    def usable_cpus(self) -> int:
        """Return how many threads can run at the same time, hyper-threads included."""
        cpus = len(self.processors)
        return max(1, min(cpus, self.quota_cpus or cpus))

    def count(self, level: Level) -> int:
        """Return how many cores, L3 groups, nodes or sockets the CPUs are in."""
        return len({one.belongs_to(level) for one in self.processors})

    @property
    def text(self) -> str:
        """Return the counts in words: `1 socket, 1 NUMA node, 2 L3 groups, 16 cores, 32 CPUs`."""
        counts = [counted(self.count(level), name) for level, name in _NAMES.items()]
        quota = (
            ()
            if self.quota_cpus is None or self.quota_cpus >= len(self.processors)
            else (f"a quota of {counted(self.quota_cpus, 'CPU')}",)
        )
        return ", ".join([*counts, counted(len(self.processors), "CPU"), *quota])

    def plan(self, threads: int) -> "Plan":
        """Return the CPUs of `threads` threads that share calls.

        Whole cores come before hyper-threads of the same, and as few sockets are used as have the
        cores. In them, L3 groups and nodes get as many threads as each other. Neighbouring threads
        share as much as they can.

        Raises:
            InvalidSetting: there is no thread.
            NotEnoughCpus: there are more threads than can run at the same time.
        """
        if threads < 1:
            raise InvalidSetting(f"threads = {threads} is out of range; use at least 1.")
        if threads > self.usable_cpus:
            raise NotEnoughCpus(
                f"{threads} threads have no CPU each, because this process may use "
                f"{counted(self.usable_cpus, 'CPU')}; use --threads {self.usable_cpus}, or ask "
                "gemm-tuner simulate."
            )
        chosen = list(self._in_turn(threads))[:threads]
        places = sorted(chosen, key=lambda one: (one.socket, one.node, one.l3_group, one.number))
        return Plan(places=tuple(places))

    def _in_turn(self, threads: int) -> Iterator[Processor]:
        """Yield the CPUs in the order in which threads take them."""
        ranks = _ranks(self.processors, Level.CORE)
        for rank in range(max(ranks.values()) + 1):
            layer = [one for one in self.processors if ranks[one.number] == rank]
            if rank == 0:
                layer = self._of_few_sockets(layer, threads) or layer
            yield from _dealt_out(layer)

    def _of_few_sockets(self, cores: list[Processor], threads: int) -> list[Processor]:
        """Return the first CPUs of cores, in as few sockets as have enough of them."""
        sizes = Counter(one.socket for one in cores)
        taken: list[int] = []
        for socket in sorted(sizes, key=lambda socket: (-sizes[socket], socket)):
            taken.append(socket)
            if sum(sizes[one] for one in taken) >= threads:
                return [one for one in cores if one.socket in taken]
        return cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The CPU of each thread of a call."""

    places: tuple[Processor, ...]

    def groups(self, level: Level) -> dict[int, tuple[Processor, ...]]:
        """Return the CPUs that are taken of each core, L3 group, node or socket."""
        found: dict[int, list[Processor]] = {}
        for one in self.places:
            found.setdefault(one.belongs_to(level), []).append(one)
        return {name: tuple(cpus) for name, cpus in found.items()}


def regular_topology(
    *, cores: int, sockets: int = 1, cores_per_l3_group: int | None = None
) -> Topology:
    """Return sockets of as many cores each, without hyper-threads, each socket a node of its own.

    L3 is shared by so many cores, by default by those of a socket.
    """
    shared_by = cores_per_l3_group or cores
    one = Processor(number=0, core=0, l3_group=0, node=0, socket=0)
    return Topology(
        processors=tuple(
            replace(
                one,
                number=socket * cores + core,
                core=socket * cores + core,
                l3_group=socket * cores + core // shared_by * shared_by,
                node=socket,
                socket=socket,
            )
            for socket in range(sockets)
            for core in range(cores)
        )
    )


def _ranks(processors: Iterable[Processor], level: Level) -> dict[int, int]:
    """Return, of each CPU, how many lower ones are in the same core, L3 group, node or socket."""
    seen: Counter[int] = Counter()
    ranks = {}
    for one in sorted(processors, key=lambda one: one.number):
        ranks[one.number] = seen[one.belongs_to(level)]
        seen[one.belongs_to(level)] += 1
    return ranks


def _dealt_out(processors: list[Processor]) -> list[Processor]:
    """Return CPUs in an order that takes one of each socket, node and L3 group in turn."""
    in_group = _ranks(processors, Level.L3_GROUP)
    firsts = [one for one in processors if in_group[one.number] == 0]
    in_node = _ranks(firsts, Level.NODE)
    group_in_node = {one.l3_group: in_node[one.number] for one in firsts}
    return sorted(
        processors,
        key=lambda one: (in_group[one.number], group_in_node[one.l3_group], one.node, one.number),
    )
