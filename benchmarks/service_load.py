"""Load the service on this machine, and print how many questions it answers a second.

    python benchmarks/service_load.py [--verdicts 1000000] [--seconds 5] [--write]

A database with that many verdicts for 50 CPUs is made of the records in tuning_db, once, and kept
in --folder. Its kernels are placeholders, which are described and attested as kernels are. One
service process runs on the first CPU; this process asks from the last over loopback, with requests
that were made before the clock runs. `--write` writes docs/service-performance.md.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import quantiles
from typing import Any

from sqlalchemy import insert, update

from gemm_tuner.derive import derive_verdict
from gemm_tuner.domain.artifact import Artifact
from gemm_tuner.domain.canonical import canonical_json
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.domain.cpu import Cpu
from gemm_tuner.domain.problem import Problem, Rows
from gemm_tuner.domain.record import Trial
from gemm_tuner.domain.verdict import Verdict
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.store.database import open_database, writing
from gemm_tuner.store.deriving import statement
from gemm_tuner.store.exchange import shipped_records
from gemm_tuner.store.problems import problem_id
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.tables import problems, verdict_state, verdicts
from gemm_tuner.store.verdict_document import dump_verdict
from gemm_tuner.trust.attestation import MeasuringKeys, Statement

CPUS = 50
CONNECTIONS = 16
BATCH = 1000
KERNELS = 64
ROWS_AT_ONCE = 5000
CONTEXT = ExecutionContext(threads=1, regime=Regime.HOT)
SOURCE = "// a placeholder\n"
REPORT = Path(__file__).parent.parent / "docs" / "service-performance.md"


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
    """Make the database, load the service, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verdicts", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/gemm-tuner-load")
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.name}")
    asked = parser.parse_args()
    folder = asked.folder / str(asked.verdicts)
    os.environ["XDG_DATA_HOME"] = str(folder)  # a measuring key and a signing key of its own
    url = make_database(folder, asked.verdicts)
    rows = measure(url, asked.verdicts, asked.seconds)
    head = (f"{asked.verdicts:,} verdicts", "answers", "p50 ms", "p99 ms", "processor µs each")
    lines = (head, ("---",) * len(head), *rows)
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    sys.stdout.write(f"{text}\n{conditions()}\n")
    if asked.write:
        REPORT.write_text(
            "# Speed of the service\n\nOne process on one core, asked over loopback from another, "
            f"by `python benchmarks/service_load.py --write`.\n\n{text}\n{conditions()}\n"
        )


def conditions() -> str:
    """Return the CPU, the date and the versions."""
    names = ("fastapi", "pydantic", "sqlalchemy", "starlette", "uvicorn")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return (
        f"{detect_cpu().brand}, {datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, "
        f"{versions}."
    )


# The database


def make_database(folder: Path, count: int) -> str:
    """Return the URL of a database with `count` verdicts, made unless it is there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / "load.sqlite3"
    url = f"sqlite:///{file}"
    done = folder / "done"
    if done.exists():
        return url
    file.unlink(missing_ok=True)
    begin_s = time.monotonic()
    engine = open_database(url)
    repository, keys = Repository(engine), MeasuringKeys()
    samples = sample_verdicts()
    for number, sample in enumerate(samples[:KERNELS]):
        assert sample.artifact is not None
        repository.add_build(sample.artifact, binary=binary_of(number), source_text=SOURCE)
    known = set[str]()
    with writing(engine).begin() as connection:
        rows = (verdict_row(keys, verdict, cpu) for verdict, cpu in each_verdict(samples, count))
        while some := list(islice(rows, ROWS_AT_ONCE)):
            new = {row["problem_id"]: problem for row, problem in some}
            fresh = [problem_row(each) for key, each in new.items() if key not in known]
            known |= new.keys()
            if fresh:
                connection.execute(insert(problems), fresh)
            connection.execute(insert(verdicts), [row for row, _problem in some])
        connection.execute(update(verdict_state).values(changes=verdict_state.c.changes + 1))
    engine.dispose()
    done.touch()
    sys.stdout.write(f"{count} verdicts made in {time.monotonic() - begin_s:.0f} s\n")
    return url


@cache
def sample_verdicts() -> list[Verdict]:
    """Return the verdicts that shipped records allow, with placeholders as kernels."""
    groups: dict[tuple[Problem, str], list[Trial]] = {}
    for trial in shipped_records():
        if trial.context == CONTEXT and trial.problem.m.exact is not None:
            groups.setdefault((trial.problem, trial.generator), []).append(trial)
    found = []
    for (problem, _generator), trials in groups.items():
        verdict = derive_verdict(
            trials, problem=problem, cpu_key=trials[0].cpu.exact_key, context=CONTEXT, complete=True
        )
        if verdict.artifact is not None:
            artifact = placeholder(verdict.artifact, len(found) % KERNELS)
            found.append(replace(verdict, artifact=artifact))
    if not found:
        raise SystemExit("no shipped record confirms a kernel")
    return found


def binary_of(number: int) -> bytes:
    """Return the bytes that stand for a kernel."""
    return f"placeholder {number}".encode()


def placeholder(artifact: Artifact, number: int) -> Artifact:
    """Return the description of a placeholder, else as that of `artifact`."""
    return replace(
        artifact,
        sha256=sha256(binary_of(number)).hexdigest(),
        size_bytes=len(binary_of(number)),
        source_sha256=sha256(SOURCE.encode()).hexdigest(),
    )


@cache
def cpus() -> list[Cpu]:
    """Return CPUs that differ from one in the records by model and stepping."""
    first = next(shipped_records()).cpu
    return [replace(first, model=1 + number // 4, stepping=number % 4) for number in range(CPUS)]


def each_problem(samples: Sequence[Verdict]) -> Iterator[Verdict]:
    """Yield sample verdicts for more and more problems, which differ in m."""
    m = 1
    while True:
        for number, sample in enumerate(samples):
            # Each sample has columns of its own, so that no two problems are the same.
            problem = replace(sample.problem, m=Rows(low=m, high=m), n=16 * (number + 1))
            yield replace(sample, problem=problem)
        m += 1


def each_verdict(samples: Sequence[Verdict], count: int) -> Iterator[tuple[Verdict, Cpu]]:
    """Yield `count` verdicts, problem by problem for all CPUs."""
    everywhere = ((verdict, cpu) for verdict in each_problem(samples) for cpu in cpus())
    return islice(everywhere, count)


def problem_row(problem: Problem) -> dict[str, Any]:
    """Return a row as the store writes it."""
    return {
        "id": problem_id(problem),
        "document": canonical_json(problem.text),
        "n": problem.n,
        "k": problem.k,
        "types": problem.types.text,
        "w_layout": problem.layout_text,
        "epilogue": problem.epilogue.text,
    }


def verdict_row(keys: MeasuringKeys, verdict: Verdict, cpu: Cpu) -> tuple[dict[str, Any], Problem]:
    """Return a row as the store writes it, attested by the user's measuring key."""
    problem, document = verdict.problem, dump_verdict(verdict)
    key = problem_id(problem)
    signed = keys.attest(Statement.VERDICT, statement("", key, cpu.exact_key, CONTEXT, document))
    assert verdict.artifact is not None
    row = {
        "problem_id": key,
        "threads": CONTEXT.threads,
        "regime": CONTEXT.regime.value,
        "model_key": cpu.model_key,
        "cpu_key": cpu.exact_key,
        "class_key": cpu.class_key,
        "m_low": problem.m.low,
        "m_high": problem.m.high,
        "imported": 0,
        "is_predicted": False,
        "newest": 1,
        "serial": 1,
        "artifact": verdict.artifact.sha256,
        "document": document,
        "attested_by": signed.public_key,
        "attestation": signed.signature,
    }
    return row, problem


# The load


@contextmanager
def service(url: str) -> Iterator[tuple[str, int, int]]:
    """Run the service on the first CPU, and yield its host, port and process."""
    first, *_others, last = [*sorted(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))]
    command = [sys.executable, "-m", "gemm_tuner", "serve", "--port", "0", "--db", url]
    command += ["--client-rate", "1000000"]
    os.sched_setaffinity(0, {first})  # the child inherits it
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    os.sched_setaffinity(0, {last})
    assert child.stderr is not None
    try:
        found = None
        while found is None and (line := child.stderr.readline()):
            found = re.search(r"http://([0-9.]+):(\d+)", line)
        if found is None:
            raise SystemExit("the service did not start")
        socket.create_connection((found[1], int(found[2]))).close()
        yield found[1], int(found[2]), child.pid
    finally:
        child.terminate()
        child.wait(30)


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
    ready = selectors.DefaultSelector()
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
        for key, _events in ready.select(0 if per_second else 1.0):
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
        batch = post("/v1/resolve:batch", {"problems": texts, "cpu": description(cpus()[-1])})

        def show_batch(name: str) -> None:
            cpu_s = processor_s(pid)
            passed_ms, _came = ask_once(address, batch)
            cpu_us = (processor_s(pid) - cpu_s) / len(texts) * 1e6
            shown = f"{passed_ms:.0f}"
            rows.append((f"batch of {len(texts)}, {name}", "", shown, shown, f"{cpu_us:.0f}"))

        show_batch("never asked")
        show_batch("in memory")
        status = Path(f"/proc/{pid}/status").read_text()
        kib = int(status.partition("VmHWM:")[2].split()[0])
        rows.append(("memory at most", f"{kib * 1024 / 1e6:.0f} MB", "", "", ""))
    return rows


if __name__ == "__main__":
    main()
