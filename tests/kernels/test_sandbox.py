"""Candidates that mean harm: none succeeds, and each is an outcome of its own."""

import os
import pickle
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
from planted import PROBLEM, RIGHT, build_planted
from platformdirs import user_data_path
from restricted import skip_where_linux_refuses

from gemm_tuner.bench.build_round import BuildRound
from gemm_tuner.bench.finding import Finding
from gemm_tuner.bench.isolate import TrialHost
from gemm_tuner.bench.measure import TimedRounds
from gemm_tuner.bench.messages import send
from gemm_tuner.bench.sample import Sample
from gemm_tuner.build.cache import build_cache_dir
from gemm_tuner.build.toolchain import Toolchain, find_toolchain
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.measurement import Timing
from gemm_tuner.domain.record import Outcome
from gemm_tuner.domain.sandbox import SandboxLevel
from gemm_tuner.errors import SandboxMissing, StoreFailed
from gemm_tuner.sandbox import confine

CALL = """
auto call = [](long number, long a = 0, long b = 0, long c = 0, long d = 0, long e = 0) {
    long result = number;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = 0;
    __asm__ volatile("syscall" : "+a"(result) : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
};
"""
REFUSED = "return GEMM_TUNER_BAD_ARGS;"  # the outcome is then `wrong`
PARENT = "call(110)"


def opens(path: str, flags: int = os.O_RDONLY) -> str:
    """Return a kernel that is right if it can open a file."""
    return f'{CALL} if (call(2, (long)"{path}", {flags}, 0600) < 0) {REFUSED} {RIGHT}'


# Each with its outcome and a word of the detail.
ATTACKS = {
    "socket": ("call(41, 2, 1);", Outcome.CRASHED, "system call 41"),
    "fork without end": ("for (;;) call(57);", Outcome.CRASHED, "system call 57"),
    "clone without end": ("for (;;) call(56, 17);", Outcome.CRASHED, "system call 56"),
    "threads without end": ("for (;;) call(56, 0x10f00);", Outcome.CRASHED, "system call 56"),
    "clone3": (f"if (call(435) == -38) {REFUSED}", Outcome.WRONG, "returned 1"),
    "program": ('call(59, (long)"/bin/sh");', Outcome.CRASHED, "system call 59"),
    "trace the parent": (f"call(101, 16, {PARENT});", Outcome.CRASHED, "system call 101"),
    "write to the parent": (f"call(311, {PARENT});", Outcome.CRASHED, "system call 311"),
    "kill the parent": (f"call(62, {PARENT}, 9);", Outcome.CRASHED, "system call 62"),
    "kill everyone": ("call(62, -1, 9);", Outcome.CRASHED, "system call 62"),
    "namespace": ("call(272, 0x10000000);", Outcome.CRASHED, "system call 272"),
    "ring of calls": ("call(425, 8);", Outcome.CRASHED, "system call 425"),
    "signal of a pipe to the parent": (
        f"call(72, 0, 8, {PARENT});",
        Outcome.CRASHED,
        "system call 72",
    ),
    "group of its own": ("call(109);", Outcome.CRASHED, "system call 109"),
    "session of its own": ("call(112);", Outcome.CRASHED, "system call 112"),
    "priority of the parent": (f"call(141, 0, {PARENT}, 19);", Outcome.CRASHED, "system call 141"),
    "scheduling of the parent": (
        f"long none = 0; call(144, {PARENT}, 5, (long)&none);",
        Outcome.CRASHED,
        "system call 144",
    ),
    "cores of the parent": (
        f"long one = 1; call(203, {PARENT}, 8, (long)&one);",
        Outcome.CRASHED,
        "system call 203",
    ),
    "System V memory": ("call(29, 0, 4096, 0600);", Outcome.CRASHED, "system call 29"),
    "message queue": ("call(240);", Outcome.CRASHED, "system call 240"),
    "endless answers to the terminal": (
        # It is /dev/null.
        f"long status[18]; call(5, 2, (long)status); if (status[5] == 0x103) {REFUSED}",
        Outcome.WRONG,
        "returned 1",
    ),
    "huge file": (
        f'if (call(77, call(2, (long)"/tmp/huge", 0x42, 0600), 1L << 40) == -27) {REFUSED}',
        Outcome.WRONG,
        "returned 1",
    ),
    # 16 GiB at a time, of which nothing is touched.
    "memory without end": (
        f"for (int i = 0; i < 4096; i++) if (call(9, 0, 1L << 34, 3, 0x4022, -1) < 0) {REFUSED}",
        Outcome.WRONG,
        "returned 1",
    ),
    "shared memory without end": (
        f"for (int i = 0; i < 4096; i++) if (call(9, 0, 1L << 34, 3, 0x4021, -1) < 0) {REFUSED}",
        Outcome.WRONG,
        "returned 1",
    ),
}


FORGED = Path(tempfile.gettempdir()) / "forged-by-a-kernel"


class Forged:
    """Its pickle calls a function where it is read."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(FORGED),)


def _message(content: bytes) -> str:
    """Return what sends a message to whoever reads from this process, in C."""
    sent = len(content).to_bytes(4, "big") + content
    text = "".join(f"\\x{byte:02x}" for byte in sent)
    return f'for (long fd = 3; fd < 64; fd++) call(1, fd, (long)"{text}", {len(sent)});'


def _as_sent(answer: object, wanted: type = Finding) -> bytes:
    """Return what a proof sends, or a timing."""
    reader, writer = Pipe(duplex=False)
    with reader, writer:
        send(writer, answer, wanted)
        return reader.recv_bytes()


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    return find_toolchain()


@pytest.fixture(scope="module")
def host(toolchain: Toolchain) -> Iterator[TrialHost]:
    with _host(toolchain) as host:
        yield host


def _host(toolchain: Toolchain) -> TrialHost:
    return TrialHost(
        PROBLEM,
        threads=1,
        baseline="scalar",
        toolchain=toolchain,
        seed=3,
        scalar_build=lambda: build_planted(toolchain),
        stall_timeout_s=6.0,
    )


def _only(level: SandboxLevel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the sandbox have this level, where it can be had."""
    monkeypatch.setattr(confine, "_BEST_FIRST", (level,))
    confine._best.cache_clear()
    if confine.look_at_sandbox().level is not level:
        skip_where_linux_refuses(confine.look_at_sandbox().why)


@pytest.fixture
def forgets_level() -> Iterator[None]:
    yield
    confine._best.cache_clear()


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_an_outcome_and_the_host_goes_on(
    host: TrialHost, toolchain: Toolchain, name: str
) -> None:
    statement, outcome, word = ATTACKS[name]

    finding = host.verify(build_planted(toolchain, f"{CALL} {statement} {RIGHT}"))

    assert (finding.outcome, word in finding.detail) == (outcome, True), finding
    assert host.verify(build_planted(toolchain)).outcome is Outcome.CORRECT


@pytest.mark.parametrize("content", [b"no JSON", pickle.dumps(Forged()), b'["no finding", null]'])
def test_a_forged_answer_is_an_outcome_of_who_forged_it(
    host: TrialHost, toolchain: Toolchain, content: bytes
) -> None:
    forged = build_planted(toolchain, f"{CALL} {_message(content)} __builtin_trap();")

    finding = host.verify(forged)

    assert finding.outcome is Outcome.CRASHED
    assert "no answer" in finding.detail
    assert not FORGED.exists()
    assert host.verify(build_planted(toolchain)).outcome is Outcome.CORRECT


def test_an_answer_that_is_too_deep_is_an_outcome(host: TrialHost, toolchain: Toolchain) -> None:
    deep = _message(b"[" * 3000)

    finding = host.verify(build_planted(toolchain, f"{CALL} {deep} __builtin_trap();"))

    assert (finding.outcome, "no answer" in finding.detail) == (Outcome.CRASHED, True), finding
    assert host.verify(build_planted(toolchain)).outcome is Outcome.CORRECT


def test_an_error_of_the_store_is_none_of_a_trial(host: TrialHost, toolchain: Toolchain) -> None:
    lie = _message(_as_sent(StoreFailed("the disk is full")))

    finding = host.verify(build_planted(toolchain, f"{CALL} {lie} __builtin_trap();"))

    assert (finding.outcome, finding.detail) == (
        Outcome.CRASHED,
        "sent what is no answer: StoreFailed",
    ), finding


def test_half_an_answer_keeps_nobody_waiting(host: TrialHost, toolchain: Toolchain) -> None:
    half = 'for (long fd = 3; fd < 64; fd++) call(1, fd, (long)"\\0\\0\\1", 3); for (;;) call(34);'

    finding = host.verify(build_planted(toolchain, f"{CALL} {half}"))

    assert finding.outcome is Outcome.HUNG
    assert "memory" not in finding.detail  # for want of which a trial would be tried again
    assert host.verify(build_planted(toolchain)).outcome is Outcome.CORRECT


@pytest.mark.parametrize(
    "sent",
    [
        "for (long fd = 3; fd < 64; fd++) call(3, fd);",  # close
        'for (long fd = 3; fd < 64; fd++) call(1, fd, (long)"\\377\\377\\377\\377", 4);',
    ],
)
def test_a_closed_pipe_keeps_nobody_waiting(
    sent: str, host: TrialHost, toolchain: Toolchain
) -> None:
    finding = host.verify(build_planted(toolchain, f"{CALL} {sent} for (;;) call(34);"))

    assert finding.outcome is Outcome.HUNG
    assert host.verify(build_planted(toolchain)).outcome is Outcome.CORRECT


def test_times_of_other_builds_than_were_asked_for_are_none(
    host: TrialHost, toolchain: Toolchain
) -> None:
    sample = Sample(elapsed_ns=100, involuntary_switches=0, waited_ns=0)
    lie = BuildRound(
        rounds=TimedRounds(
            timings=(Timing(calls_per_sample=1, samples_ns=(100,)),), samples=((sample,),)
        ),
        builds=5,
        baselines=(7,),
        peak_flop_per_s=1.0,
        roofline=None,
        use=None,
        least_ns=0.0,
        epilogue_ns=0.0,
    )
    planted = build_planted(toolchain, f"{CALL} {_message(_as_sent(lie, BuildRound))} {RIGHT}")
    context = ExecutionContext(threads=1)

    found = host.time_together(
        [planted, build_planted(toolchain)], context=context, pairs=3, sample_ns=100_000
    )

    assert [one.finding.outcome for one in found] == [Outcome.CRASHED, Outcome.CORRECT]
    assert "5 builds" in found[0].finding.detail


@pytest.mark.parametrize(
    ("level", "is_refused"),
    [
        (SandboxLevel.NAMESPACES, True),
        (SandboxLevel.LANDLOCK, True),
        (SandboxLevel.LIMITS, False),
        (None, False),
    ],
)
@pytest.mark.usefixtures("forgets_level")
def test_keys_and_home_are_out_of_reach(
    level: SandboxLevel | None,
    toolchain: Toolchain,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    is_refused: bool,
) -> None:
    """Where it is not, the same kernels read and write: the level says so."""
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(build_cache_dir().parent))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    key = user_data_path("gemm-tuner") / "measuring-key.pem"
    key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    key.touch(0o600)
    written = tmp_path / "documents" / "planted"
    written.parent.mkdir()
    attacks = [
        opens(str(key)),
        opens(str(written), os.O_CREAT | os.O_WRONLY),
    ]
    # At `limits`, it depends on the rights of this process.
    if level is not SandboxLevel.LIMITS:
        attacks += [
            opens(f"/proc/{os.getpid()}/mem", os.O_RDWR),
            opens(f"/proc/{os.getpid()}/environ"),
        ]
    if level is None:
        monkeypatch.setenv("GEMM_TUNER_SANDBOX", "off")
    else:
        _only(level, monkeypatch)

    with _host(toolchain) as host:
        found = [host.verify(build_planted(toolchain, attack)).outcome for attack in attacks]
        timed = host.time(
            build_planted(toolchain), context=ExecutionContext(), pairs=2, sample_ns=20_000
        )

    expected = Outcome.WRONG if is_refused else Outcome.CORRECT
    assert found == [expected] * len(attacks)
    assert written.exists() != is_refused
    assert timed.conditions is not None
    assert timed.conditions.sandbox is (level or SandboxLevel.NONE)


@pytest.mark.usefixtures("forgets_level")
def test_what_is_required_and_not_there_is_an_error(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confine, "_BEST_FIRST", (SandboxLevel.LIMITS,))
    confine._best.cache_clear()
    monkeypatch.setenv("GEMM_TUNER_SANDBOX", "require")

    with pytest.raises(SandboxMissing, match="only limits"):
        _host(toolchain)
