"""What CPUs share, read from made-up trees of /sys, and where threads are put."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from gemm_tuner.domain.topology import Level, Topology, regular_topology
from gemm_tuner.errors import InvalidSetting, NotEnoughCpus
from gemm_tuner.machine.system import SystemFiles, cpus_text
from gemm_tuner.machine.topology import detect_topology

CPUS = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"
CGROUP = "sys/fs/cgroup"


def tree(root: Path, files: Mapping[str, str]) -> SystemFiles:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return SystemFiles(root)


def listed(cpus: Iterable[int]) -> str:
    return cpus_text(frozenset(cpus))


def server(*, sockets: int = 2, nodes: int = 4, cores: int = 8, threads: int = 2) -> dict[str, str]:
    """Return a server of `sockets` with `nodes` each, which have an L3 group of `cores` each.

    Linux numbers the second hyper-threads after the first of all cores.
    """
    all_cores = sockets * nodes * cores
    files = {f"{CPUS}/online": f"0-{all_cores * threads - 1}"}
    for core in range(all_cores):
        group = range(core // cores * cores, core // cores * cores + cores)
        siblings = [core + turn * all_cores for turn in range(threads)]
        for cpu in siblings:
            folder = f"{CPUS}/cpu{cpu}"
            files |= {
                f"{folder}/topology/physical_package_id": str(core // (nodes * cores)),
                f"{folder}/topology/thread_siblings_list": listed(siblings),
                f"{folder}/cache/index0/level": "1",
                f"{folder}/cache/index0/shared_cpu_list": listed(siblings),
                f"{folder}/cache/index3/level": "3",
                f"{folder}/cache/index3/shared_cpu_list": listed(
                    one + turn * all_cores for one in group for turn in range(threads)
                ),
            }
    for node in range(sockets * nodes):
        first = range(node * cores, node * cores + cores)
        files[f"{NODES}/node{node}/cpulist"] = listed(
            one + turn * all_cores for one in first for turn in range(threads)
        )
    return files


def counts(topology: Topology) -> tuple[int, ...]:
    return tuple(
        topology.count(level) for level in (Level.SOCKET, Level.NODE, Level.L3_GROUP, Level.CORE)
    )


def sizes(topology: Topology, threads: int, level: Level) -> list[int]:
    return [len(cpus) for cpus in topology.plan(threads).groups(level).values()]


def test_two_sockets_of_four_nodes_with_hyper_threads(tmp_path: Path) -> None:
    topology = detect_topology(tree(tmp_path, server()), affinity=range(128))

    assert counts(topology) == (2, 8, 8, 64)
    assert topology.text == "2 sockets, 8 NUMA nodes, 8 L3 groups, 64 cores, 128 CPUs"
    assert sizes(topology, 32, Level.SOCKET) == [32]  # one is enough
    assert sizes(topology, 6, Level.L3_GROUP) == [2, 2, 1, 1]
    assert sizes(topology, 64, Level.SOCKET) == [32, 32]
    assert sizes(topology, 64, Level.CORE) == [1] * 64
    assert sizes(topology, 96, Level.L3_GROUP) == [12] * 8
    assert sizes(topology, 128, Level.CORE) == [2] * 64


def test_one_socket(tmp_path: Path) -> None:
    files = server(sockets=1, nodes=1, cores=4, threads=1)

    topology = detect_topology(tree(tmp_path, files), affinity=range(4))

    assert counts(topology) == (1, 1, 1, 4)
    assert topology.text == "1 socket, 1 NUMA node, 1 L3 group, 4 cores, 4 CPUs"
    assert [one.number for one in topology.plan(3).places] == [0, 1, 2]


def test_a_mask_leaves_cpus_out(tmp_path: Path) -> None:
    # Two cores of the first group with both of their threads, and three of the last.
    mask = {0, 1, 64, 65, 61, 62, 63}

    topology = detect_topology(tree(tmp_path, server()), affinity=mask)

    assert counts(topology) == (2, 2, 2, 5)
    assert {one.number for one in topology.plan(5).places} == {0, 1, 61, 62, 63}
    assert {one.number for one in topology.plan(3).places} == {61, 62, 63}  # in one socket
    with pytest.raises(
        NotEnoughCpus, match=r"8 threads have no CPU each, because .* may use 7 CPUs"
    ):
        topology.plan(8)


def test_cpus_that_are_switched_off_are_left_out(tmp_path: Path) -> None:
    files = server(sockets=1, nodes=2, cores=4, threads=1) | {f"{CPUS}/online": "0-2,4-7"}

    topology = detect_topology(tree(tmp_path, files), affinity=range(8))

    assert [one.number for one in topology.processors] == [0, 1, 2, 4, 5, 6, 7]
    assert sizes(topology, 7, Level.L3_GROUP) == [3, 4]


@pytest.mark.parametrize(
    ("quota", "usable", "told"),
    [
        ("200000 100000", 2, ", a quota of 2 CPUs"),
        ("50000 100000", 1, ", a quota of 1 CPU"),
        ("max 100000", 4, ""),
        ("900000 100000", 4, ""),  # more than there are
    ],
)
def test_a_quota_bounds_the_threads(quota: str, usable: int, told: str, tmp_path: Path) -> None:
    files = server(sockets=1, nodes=1, cores=4, threads=1) | {
        f"{CGROUP}/cpu.max": quota,
        "proc/self/cgroup": "0::/",
    }

    topology = detect_topology(tree(tmp_path, files), affinity=range(4))

    assert topology.usable_cpus == usable
    assert topology.text == f"1 socket, 1 NUMA node, 1 L3 group, 4 cores, 4 CPUs{told}"


@pytest.mark.parametrize(
    "files",
    [
        {},
        {f"{CPUS}/online": "", f"{NODES}/node0/cpulist": "rubbish"},
        {f"{NODES}/node0-of-old/cpulist": "0-2"},
        {f"{CPUS}/cpu{cpu}/topology/physical_package_id": "-1" for cpu in range(3)},
        {f"{CPUS}/cpu{cpu}/cache/index3/level": "3" for cpu in range(3)},
        {f"{CPUS}/cpu{cpu}/topology/thread_siblings_list": "\0" for cpu in range(3)},
    ],
)
def test_what_the_system_does_not_tell_is_one_socket(
    files: Mapping[str, str], tmp_path: Path
) -> None:
    topology = detect_topology(tree(tmp_path, files), affinity=[0, 1, 2])

    assert counts(topology) == (1, 1, 1, 3)
    assert len(topology.plan(3).places) == 3


def test_without_l3_those_of_a_socket_share(tmp_path: Path) -> None:
    files = {
        name: text
        for name, text in server(sockets=2, nodes=1, cores=2, threads=1).items()
        if "index3" not in name
    } | {
        f"{CPUS}/cpu{cpu}/topology/core_siblings_list": f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}"
        for cpu in range(4)
    }

    topology = detect_topology(tree(tmp_path, files), affinity=range(4))

    assert counts(topology) == (2, 2, 2, 4)


def test_this_machine_has_a_plan_for_all_it_may_use() -> None:
    topology = detect_topology()

    places = topology.plan(topology.usable_cpus).places

    assert len({one.number for one in places}) == topology.usable_cpus


@pytest.mark.parametrize("threads", [1, 5, 8, 64, 65, 100, 128])
def test_threads_are_spread_evenly_over_as_few_sockets_as_hold_them(threads: int) -> None:
    topology = regular_topology(cores=64, sockets=2, cores_per_l3_group=8)

    groups = sizes(topology, threads, Level.L3_GROUP)

    assert sum(groups) == threads
    assert max(groups) - min(groups) <= 1
    assert len(sizes(topology, threads, Level.SOCKET)) == (1 if threads <= 64 else 2)
    assert len(groups) == min(threads, 8 if threads <= 64 else 16)


def test_no_thread_has_no_plan() -> None:
    with pytest.raises(InvalidSetting, match="use at least 1"):
        regular_topology(cores=2).plan(0)
