"""Load the service on this machine, and print how many questions it answers a second.

    python benchmarks/service_load.py [--verdicts 10000 1000000] [--postgres 100000]
                                      [--trials 10000] [--seconds 5] [--write]

A database with that many verdicts for 50 CPUs is made of the records in tuning_db, once, and kept
in --folder; on a private PostgreSQL server, it is made anew. Its kernels are placeholders, which
are described and attested as kernels are. One service process runs on the first CPU or the last,
whichever is faster then; this process asks from the other over loopback, with requests that were
made before the clock runs. The files of databases are read once before, so that the system has them
in memory, and a service has counted its verdicts for the pages. `--write` writes
docs/service-performance.md.
"""

import argparse
import json
import os
import platform
import re
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from service_databases import (
    CONTEXT,
    CPUS,
    cpus,
    each_problem,
    fill,
    fill_with_trials,
    sample_verdicts,
)

from gemm_tuner.domain.canonical import identity
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.select.choose import choose
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database

ROWS = 5  # raised when what a row holds changes: databases are kept
CONNECTIONS = 16
BATCH = 1000
BATCHES = 5
LOOKS = 500
LOOK_S = 1.0
IDLE_SHARE = 0.1  # of a core
ALLOWED = frozenset(os.sched_getaffinity(0))
ROUNDS, WORK = 20, 2_000_000
ROOT = Path(__file__).parent.parent
PAGES = "\n## Pages\n"  # of dashboard_load.py
REPORT = ROOT / "docs" / "service-performance.md"
COUNTING = (
    "A service that starts counts its verdicts for the pages, beside the answers: a million take "
    "6 s of a core, on which it answered a fifth less meanwhile. The tables are of a service that "
    "has counted."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a load showed: answers a second, the time to them, and the service's for each.

    Where others use the machine too, only the last says what the service can do.
    """

    per_second: float
    cpu_us: float
    p50_ms: float
    p99_ms: float


def main() -> None:
    """Make the databases, load the service with each, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verdicts", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--trials", type=int, default=10_000, help="of one problem")
    parser.add_argument("--postgres", type=int, help="verdicts on PostgreSQL, and on SQLite beside")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/gemm-tuner-load")
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.name}")
    asked = parser.parse_args()
    os.environ["XDG_DATA_HOME"] = str(asked.folder)  # a measuring key and a signing key of its own
    asked.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    databases = [
        (count, "SQLite", sqlite_database(asked.folder, count)) for count in asked.verdicts
    ]
    if count := asked.postgres:
        databases += [
            (count, "SQLite", sqlite_database(asked.folder, count)),
            (
                count,
                "PostgreSQL",
                postgres_database(partial(fill, count=count), f"{count} verdicts"),
            ),
        ]
    tables = []
    for count, kind, database in databases:
        with database as url:
            rows = measure(url, count, asked.seconds)
        tables.append(table(f"{kind}, {count:,} verdicts", rows))
    tables.append(growth(asked.trials))
    text = "\n".join(tables)
    sys.stdout.write(f"{text}\n{conditions()}\n")
    if asked.write:
        # What others wrote into it stays.
        _own, _mark, pages = (REPORT.read_text() if REPORT.exists() else "").partition(PAGES)
        REPORT.write_text(
            "# Speed of the service\n\nOne process on one core, asked over loopback from another, "
            f"by `{command_text()}`. {COUNTING}\n\n{text}\n{conditions()}\n{_mark}{pages}"
        )


def table(name: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a table of loads in Markdown."""
    head = (name, "answers", "p50 ms", "p99 ms", "processor µs each")
    lines = (head, ("---",) * len(head), *rows)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def command_text() -> str:
    """Return the command of this process, without the `--folder` of one machine."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder")
    _of_this_machine, given = parser.parse_known_args(sys.argv[1:])
    return " ".join(("python", f"benchmarks/{Path(sys.argv[0]).name}", *given))


def conditions() -> str:
    """Return the CPU, the date and the versions."""
    names = ("fastapi", "h11", "pydantic", "sqlalchemy", "starlette", "uvicorn")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return (
        f"{detect_cpu().brand}, {datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, "
        f"{versions}."
    )


@contextmanager
def sqlite_database(folder: Path, count: int) -> Iterator[str]:
    """Yield the URL of a database with `count` verdicts, made unless it is there."""
    of_what = identity([ROWS, *(each.problem.text for each in sample_verdicts())])[:8]
    file = folder / f"{count}-{of_what}.sqlite3"
    url = made_once(file, partial(fill, count=count), f"{count} verdicts")
    with file.open(
        "rb"
    ) as database:  # so that it is in the system's cache, as of a running service
        while database.read(2**24):
            pass
    yield url


def made_once(file: Path, make: Callable[[str], float], what: str) -> str:
    """Return the URL of an SQLite file, made by what returns its seconds, unless it is whole."""
    done, url = file.with_suffix(".done"), f"sqlite:///{file}"
    if not done.exists():
        file.unlink(missing_ok=True)
        sys.stdout.write(f"{what} made in {make(url):.0f} s\n")
        done.touch()
    return url


@contextmanager
def postgres_database(make: Callable[[str], float], what: str) -> Iterator[str]:
    """Yield the URL of a new database on a server of its own, made by what returns its seconds."""
    sys.path.append(str(ROOT / "tests"))
    from postgres import find_programs, postgres_server  # noqa: PLC0415 - the tests' own server

    programs = find_programs()
    if programs is None:
        raise SystemExit("no PostgreSQL server is installed; Debian's package postgresql has one")
    with postgres_server(programs) as server:
        server.run_sql("CREATE DATABASE load")
        url = server.url("load")
        sys.stdout.write(f"{what} made in {make(url):.0f} s\n")
        yield url


def growth(count: int) -> str:
    """Return how long a verdict takes to find for a problem with one trial, and with `count`."""
    with TemporaryDirectory() as folder:
        engine = open_database(f"sqlite:///{folder}/trials.sqlite3")
        repository = Repository(engine, quorum=1)  # as the service has it
        few, many = fill_with_trials(engine, (1, count))
        times_us: tuple[list[float], list[float]] = ([], [])
        for _look in range(LOOKS):
            for trial, times in zip((few, many), times_us, strict=True):
                begin_s = time.perf_counter()
                match = choose(repository, trial.problem, cpu=trial.cpu, context=CONTEXT)
                times.append((time.perf_counter() - begin_s) * 1e6)
                assert match.verdict.artifact is not None
        engine.dispose()
    first, second = map(median, times_us)
    return (
        f"To find the verdict of a problem takes {first:.0f} µs where it has one trial, and "
        f"{second:.0f} µs, {second / first:.2f} times as long, where it has {count:,}.\n"
    )


# The load


@contextmanager
def service(url: str) -> Iterator[tuple[str, int, int]]:
    """Run the service on the CPU that is faster, and yield its host, port and process."""
    own, other = by_speed()
    command = [sys.executable, "-m", "gemm_tuner", "serve", "--port", "0", "--db", url]
    command += ["--client-rate", "1000000", "--workers", "0"]
    os.sched_setaffinity(0, {own})  # the child inherits it
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    os.sched_setaffinity(0, {other})
    assert child.stderr is not None
    try:
        found = None
        while found is None and (line := child.stderr.readline()):
            found = re.search(r"http://([0-9.]+):(\d+)", line)
        if found is None:
            raise SystemExit("the service did not start")
        socket.create_connection((found[1], int(found[2]))).close()
        wait_for_count(child.pid)
        yield found[1], int(found[2]), child.pid
    finally:
        child.terminate()
        child.wait(30)


def by_speed() -> tuple[int, int]:
    """Return the first and the last CPU, the faster one first: neighbours slow down either."""
    ends = (min(ALLOWED), max(ALLOWED))
    times_s: dict[int, list[float]] = {cpu: [] for cpu in ends}
    for _round in range(ROUNDS):
        for cpu in ends:
            os.sched_setaffinity(0, {cpu})
            begin_s = time.perf_counter()
            sum(range(WORK))
            times_s[cpu].append(time.perf_counter() - begin_s)
    fast, slow = sorted(ends, key=lambda cpu: median(times_s[cpu]))
    return fast, slow


def post(path: str, document: object, tag: str | None = None) -> bytes:
    """Return the bytes of a request."""
    body = json.dumps(document).encode()
    condition = f"If-None-Match: {tag}\r\n" if tag else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{condition}"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def question(problem: Problem, cpu: Cpu) -> dict[str, object]:
    """Return a question as the client asks it."""
    return {"problem": problem.text, "cpu": description(cpu)}


def description(cpu: Cpu) -> dict[str, object]:
    """Return a CPU as the client describes it."""
    caches = {name: getattr(cpu.caches, name) for name in ("l1d_bytes", "l2_bytes", "l3_bytes")}
    return {
        "vendor": cpu.vendor,
        "brand": cpu.brand,
        "family": cpu.family,
        "model": cpu.model,
        "stepping": cpu.stepping,
        "isa": sorted(feature.value for feature in cpu.isa),
        "caches": caches,
        "physical_cores": cpu.physical_cores,
    }


class Connection:
    """A connection that is kept, and the request that it waits for."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.begun_s = 0.0
        self.came = b""

    def ask(self, request: bytes) -> None:
        """Send a request."""
        self.begun_s, self.came = time.perf_counter(), b""
        self.socket.sendall(request)

    def take(self) -> int | None:
        """Read what came, and return the status when the answer is whole."""
        self.came += self.socket.recv(2**20)
        head, end, body = self.came.partition(b"\r\n\r\n")
        if not end:
            return None
        status = int(head[9:12])
        length = re.search(rb"content-length: (\d+)", head)
        if status != 304 and length is None:
            raise SystemExit(f"an answer without its length: {head!r}")
        return status if len(body) >= (int(length[1]) if length and status != 304 else 0) else None


def processor_s(pid: int) -> float:
    """Return the processor time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for_count(pid: int) -> None:
    """Wait until a service that has started is idle: it counts its verdicts for the pages first."""
    before_s = -1.0
    while (used_s := processor_s(pid)) > before_s + IDLE_SHARE * LOOK_S:
        before_s = used_s
        time.sleep(LOOK_S)


def ask_once(address: tuple[str, int], request: bytes) -> tuple[float, bytes]:
    """Return how long one answer took in milliseconds, and its bytes."""
    connection = Connection(address)
    connection.ask(request)
    while (status := connection.take()) is None:
        pass
    passed_ms = (time.perf_counter() - connection.begun_s) * 1e3
    connection.socket.close()
    if status != 200:
        raise SystemExit(f"answered {status}: {connection.came!r}")
    return passed_ms, connection.came


def load(
    address: tuple[str, int],
    pid: int,
    requests: Sequence[bytes],
    *,
    expected: int,
    seconds: float,
    connections: int = CONNECTIONS,
    per_second: float | None = None,
    once: bool = False,
) -> Load:
    """Ask on several connections, as fast as answers come or at a rate, and count.

    With `once` no request is sent twice, and the load ends with the last.
    """
    coming = deque(requests)
    idle = [Connection(address) for _number in range(connections)]
    ready = selectors.SelectSelector()  # it waits for parts of a millisecond, where others round up
    for each in idle:
        ready.register(each.socket, selectors.EVENT_READ, each)
    times_s: list[float] = []
    cpu_s = processor_s(pid)
    begin_s = last_s = time.perf_counter()
    asked = busy = 0
    while True:
        now_s = time.perf_counter()
        is_over = now_s - begin_s >= seconds or not coming
        due = len(idle) if per_second is None else int((now_s - begin_s) * per_second) - asked
        while idle and coming and due > 0 and not is_over:
            request = coming.popleft()
            idle.pop().ask(request)
            if not once:
                coming.append(request)
            asked, busy, due = asked + 1, busy + 1, due - 1
        if is_over and not busy:
            break
        for key, _events in ready.select(until_due_s(begin_s, asked, per_second)):
            connection = key.data
            status = connection.take()
            if status is None:
                continue
            if status != expected:
                raise SystemExit(f"answered {status} in the place of {expected}")
            last_s = time.perf_counter()
            times_s.append(last_s - connection.begun_s)
            idle.append(connection)
            busy -= 1
    cpu_s = processor_s(pid) - cpu_s
    ready.close()
    for each in idle:
        each.socket.close()
    cuts = quantiles(times_s, n=100)
    return Load(
        per_second=len(times_s) / (last_s - begin_s),
        cpu_us=cpu_s / len(times_s) * 1e6,
        p50_ms=cuts[49] * 1e3,
        p99_ms=cuts[98] * 1e3,
    )


def until_due_s(begin_s: float, asked: int, per_second: float | None) -> float:
    """Return how long to wait for answers before the next question is due at a rate.

    To spin instead would disturb the service, whose core shares a machine with this one.
    """
    if per_second is None:
        return 1.0
    return max(0.0, begin_s + (asked + 1) / per_second - time.perf_counter())


def measure(url: str, count: int, seconds: float) -> list[tuple[str, ...]]:
    """Return the rows of the table: what was asked, and what was seen."""
    samples = list(islice(each_problem(sample_verdicts()), count // CPUS))
    asked = [(each.problem, cpu) for cpu in cpus() for each in samples]
    step = max(1, len(asked) // 40_000)
    asked = asked[::step]
    hot, cold = asked[:1000], asked[1000:]
    rows: list[tuple[str, ...]] = []
    with service(url) as (host, port, pid):
        address = (host, port)
        requests, tagged = [], []
        for problem, cpu in hot:
            requests.append(post("/v1/resolve", question(problem, cpu)))
            _ms, came = ask_once(address, requests[-1])
            if b'"decision":"baseline"' in came or b'"sha256"' not in came:
                raise SystemExit(f"{problem.text} has no kernel in the answer: {came!r}")
            found = re.search(rb'etag: ("[0-9a-f]+")', came)
            assert found is not None
            tagged.append(post("/v1/resolve", question(problem, cpu), found[1].decode()))

        def show(name: str, one: Load) -> None:
            rows.append(
                (
                    name,
                    f"{one.per_second:,.0f}/s",
                    f"{one.p50_ms:.1f}",
                    f"{one.p99_ms:.1f}",
                    f"{one.cpu_us:.0f}",
                )
            )

        unchanged = load(address, pid, tagged, expected=304, seconds=seconds)
        show(f"304, {CONNECTIONS} connections", unchanged)
        full = load(address, pid, requests, expected=200, seconds=seconds)
        show(f"full, in memory, {CONNECTIONS} connections", full)
        half = load(
            address,
            pid,
            tagged,
            expected=304,
            seconds=seconds,
            per_second=unchanged.per_second / 2,
        )
        show("304 at half that rate", half)
        half = load(
            address, pid, requests, expected=200, seconds=seconds, per_second=full.per_second / 2
        )
        show("full at half that rate", half)
        show(
            "304, one connection",
            load(address, pid, tagged, expected=304, seconds=seconds, connections=1),
        )
        show(
            "full, one connection",
            load(address, pid, requests, expected=200, seconds=seconds, connections=1),
        )
        new = [post("/v1/resolve", question(*each)) for each in cold[BATCH:]]
        show(
            f"full, never asked, {CONNECTIONS} connections",
            load(address, pid, new, expected=200, seconds=seconds, once=True),
        )
        texts = [each.problem.text for each in samples[:BATCH]]
        batches = [
            post("/v1/resolve:batch", {"problems": texts, "cpu": description(cpu)})
            for cpu in cpus()[-BATCHES:]
        ]

        def show_batches(name: str) -> None:
            cpu_s = processor_s(pid)
            passed_ms = [ask_once(address, batch)[0] for batch in batches]
            cpu_us = (processor_s(pid) - cpu_s) / len(batches) / len(texts) * 1e6
            rows.append(
                (
                    f"batch of {len(texts)}, {name}, {len(batches)} of them",
                    "",
                    f"{median(passed_ms):.0f}",
                    f"{max(passed_ms):.0f}",
                    f"{cpu_us:.0f}",
                )
            )

        show_batches("never asked")
        show_batches("in memory")
        status = Path(f"/proc/{pid}/status").read_text()
        kib = int(status.partition("VmHWM:")[2].split()[0])
        rows.append(("memory at most", f"{kib * 1024 / 1e6:.0f} MB", "", "", ""))
    return rows


if __name__ == "__main__":
    main()
