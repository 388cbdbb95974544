"""Detect the topology: sockets, NUMA nodes, L3 groups and cores of the usable CPUs.

What the system does not tell counts as not shared, where it is a core, and as one for the whole
socket otherwise.
"""

import os
from collections.abc import Collection

from gemm_tuner.domain.topology import Processor, Topology
from gemm_tuner.machine.cpus import quota_cpus
from gemm_tuner.machine.system import SystemFiles

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"
_L3 = 3


def detect_topology(
    files: SystemFiles | None = None, affinity: Collection[int] | None = None
) -> Topology:
    """Return the CPUs that this process may use, by its affinity and the quota of its group.

    `files` are those of this machine, and `affinity` that of this process, if none are given. CPUs
    that are switched off are left out.
    """
    files = files or SystemFiles()
    usable = frozenset(os.sched_getaffinity(0) if affinity is None else affinity)
    online = files.cpus(f"{_CPUS}/online") or usable
    nodes = _nodes(files)
    return Topology(
        processors=tuple(
            _processor(files, number, nodes) for number in sorted(usable & online or usable)
        ),
        quota_cpus=quota_cpus(files.path("sys/fs/cgroup"), files.path("proc/self/cgroup")),
    )


def _processor(files: SystemFiles, number: int, nodes: dict[int, int]) -> Processor:
    topology = f"{_CPUS}/cpu{number}/topology"
    siblings = files.cpus(f"{topology}/thread_siblings_list") or {number}
    # Below a hypervisor it may be -1, which is no number.
    socket = files.number(f"{topology}/physical_package_id") or 0
    of_socket = files.cpus(f"{topology}/core_siblings_list")
    return Processor(
        number=number,
        core=min(siblings | {number}),
        l3_group=min(_shares_l3(files, number) or of_socket or {0}),
        node=nodes.get(number, socket),
        socket=socket,
    )


def _nodes(files: SystemFiles) -> dict[int, int]:
    """Return the NUMA node of each CPU that the system tells of."""
    found: dict[int, int] = {}
    for folder in sorted(files.path(_NODES).glob("node[0-9]*")):
        node = folder.name.removeprefix("node")
        if node.isdecimal():
            found |= dict.fromkeys(files.cpus(f"{_NODES}/{folder.name}/cpulist") or (), int(node))
    return found


def _shares_l3(files: SystemFiles, number: int) -> frozenset[int] | None:
    caches = f"{_CPUS}/cpu{number}/cache"
    for folder in sorted(files.path(caches).glob("index*")):
        if files.number(f"{caches}/{folder.name}/level") == _L3:
            return files.cpus(f"{caches}/{folder.name}/shared_cpu_list")
    return None
