"""Many problems in one request; lock files: what they name or nothing, and without a network."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from relay import Instead
from served import PROBLEM, Site, keep_trial

from gemm_tuner import Client
from gemm_tuner.build.compile import Build
from gemm_tuner.cli.main import ANSWER_IS_NO, SOMETHING_IS_MISSING, run
from gemm_tuner.client.transport import Connections, Session
from gemm_tuner.errors import InvalidProblem, InvalidSetting, NotLocked, ServiceUnreachable
from gemm_tuner.libraries.fallback import FallbackKernel
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import Kernel

OTHERS = [f"f32 1x2x{k}" for k in range(1, 9)]


def _locked(site: Site, tmp_path: Path) -> Path:
    file = tmp_path / "gemm-tuner.lock"
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "first")
        client.kernels([*OTHERS, PROBLEM])
        client.write_lock(file)
    return file


def test_many_problems_are_one_request_with_the_answers_of_each(site: Site, tmp_path: Path) -> None:
    batch, single = Instead("/v1/resolve:batch"), Instead("/v1/resolve")
    with site.serving(around=lambda app: batch(single(app))) as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        found = client.kernels([OTHERS[0], PROBLEM, *OTHERS, PROBLEM])
        again = client.kernels([PROBLEM, OTHERS[0]])
        assert (batch.asked, single.asked) == (1, 0)
        one_by_one = Client(address, cache_dir=tmp_path / "other")
        alone = [one_by_one.kernel(one) for one in (OTHERS[0], PROBLEM)]

    assert [type(one) for one in found[:2]] == [FallbackKernel, Kernel]
    assert again == [found[1], found[0]]
    assert found[1] is found[-1]
    assert [one.reason for one in alone] == [one.reason for one in found[:2]]
    offline = Client(address, cache_dir=tmp_path / "cache", offline=True)
    assert isinstance(offline.kernels([PROBLEM])[0], Kernel)


def test_many_problems_without_a_service_are_computed_by_libraries(tmp_path: Path) -> None:
    found = Client("http://127.0.0.1:9", cache_dir=tmp_path / "cache").kernels(OTHERS)

    assert all("does not answer" in one.reason for one in found)
    assert Client(cache_dir=tmp_path / "cache").kernels([]) == []
    with pytest.raises(InvalidProblem):
        Client(cache_dir=tmp_path / "cache").kernels([PROBLEM, "f32 0x1x1"])


def test_a_locked_kernel_stays_whatever_the_service_says_now(
    site: Site, build: Build, tmp_path: Path
) -> None:
    file = _locked(site, tmp_path)
    keep_trial(site.repository, build, cpu=detect_cpu(), speed=0.5)

    with site.serving() as address:
        free = Client(address, cache_dir=tmp_path / "free").kernel(PROBLEM)
        locked = Client(address, cache_dir=tmp_path / "cache", lock=file, frozen=True)
        kernel = locked.kernel(PROBLEM)
        layer = locked.layer(PROBLEM.n, PROBLEM.k, m=[8], epilogue=PROBLEM.epilogue.text)

    assert isinstance(free, FallbackKernel)
    assert isinstance(kernel, Kernel)
    assert isinstance(layer.kernels[0], Kernel)
    offline = Client(address, cache_dir=tmp_path / "cache", lock=file, frozen=True, offline=True)
    assert isinstance(offline.kernels([PROBLEM])[0], Kernel)


def test_a_lock_file_is_written_with_what_was_locked_before(site: Site, tmp_path: Path) -> None:
    file = _locked(site, tmp_path)
    before = file.read_text().splitlines()

    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "cache", lock=file)
        client.kernels([PROBLEM, *OTHERS, "f32 2x3x4"])
        client.write_lock(file)

    after = file.read_text().splitlines()
    assert set(before) < set(after)
    assert len(after) == len(before) + 1


def test_what_is_not_locked_is_an_error_that_names_the_problem(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _locked(site, tmp_path)
    monkeypatch.setenv("GEMM_TUNER_FROZEN", "1")
    client = Client("http://127.0.0.1:9", cache_dir=tmp_path / "cache", lock=file)

    with pytest.raises(NotLocked, match="names nothing for 'f32 3x5x7 nk none'"):
        client.kernel("f32 3x5x7")
    with pytest.raises(NotLocked, match="names nothing for 'f32 3x5x7 nk none'"):
        client.kernels(["f32 3x5x7"])
    with pytest.raises(NotLocked, match="f32 3x5x7"):
        client.layer(5, 7, m=[3])
    with pytest.raises(NotLocked, match=r"'f32 8x32x16 nk bias\+relu' cannot be had"):
        client.kernel(PROBLEM)


def test_an_artifact_that_is_not_the_locked_one_is_refused(site: Site, tmp_path: Path) -> None:
    file = _locked(site, tmp_path)

    def swap(path: str, body: bytes) -> bytes:
        return bytes([body[0], body[1] ^ 1]) + body[2:] if "/artifacts/" in path else body

    with site.serving(swap) as address:
        client = Client(address, cache_dir=tmp_path / "cache", lock=file, frozen=True)
        with pytest.raises(NotLocked, match="the artifact has the sha256"):
            client.kernel(PROBLEM)


def test_offline_nothing_is_sent(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Instead(path) for path in ("/v1/resolve", "/v1/resolve:batch", "/v1/keys")]
    monkeypatch.setenv("GEMM_TUNER_OFFLINE", "1")
    with site.serving(around=lambda app: asked[0](asked[1](asked[2](app)))) as address:
        client = Client(address, cache_dir=tmp_path / "cache")
        kernel = client.kernel(PROBLEM)
        client.kernels(OTHERS)
        client.layer(4, 4, m=[1])
        with pytest.raises(ServiceUnreachable, match="offline"):
            client.resolve(PROBLEM)

    assert "offline" in kernel.reason
    assert [one.asked for one in asked] == [0, 0, 0]


def test_a_lock_file_is_the_same_in_whatever_order_it_was_asked_for(
    site: Site, tmp_path: Path
) -> None:
    first = _locked(site, tmp_path).read_text()
    with site.serving() as address:
        client = Client(address, cache_dir=tmp_path / "second")
        for one in [PROBLEM.text, *reversed(OTHERS)]:
            client.kernel(one)
        client.write_lock(tmp_path / "second.lock")

    assert (tmp_path / "second.lock").read_text() == first
    lines = [json.loads(line) for line in first.splitlines()]
    assert [line["problem"] for line in lines[1:]] == sorted(
        [PROBLEM.text, *(f"{one} nk none" for one in OTHERS)]
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: f"<<<<<<< HEAD\n{text}", "line 1, is of a merge that is not finished"),
        (lambda text: text.replace('lock":1', 'lock":2'), "it is no lock file of this version"),
        (lambda _text: "", "it is no lock file of this version"),
        (lambda text: text + text.splitlines()[1], "is locked twice"),
        (lambda text: text + "{}\n", "problem: Field required"),
        (lambda text: text + "junk\n", "line 11: Invalid JSON"),
        (lambda text: text.replace("f32 1x2x1 ", "f31 1x2x1 "), "line 2: "),
        (lambda text: text.replace("f32 1x2x1 nk none", "f32 1x2x1 nk x"), "line 2: epilogue"),
        (lambda text: text.replace("1x2x1 ", f"1x2x{'9' * 5000} "), "line 2: problem"),
    ],
)
def test_a_lock_file_that_cannot_be_used_is_told_by_line(
    edit: Callable[[str], str], message: str, site: Site, tmp_path: Path
) -> None:
    file = _locked(site, tmp_path)
    file.write_text(edit(file.read_text()))

    with pytest.raises(InvalidSetting, match=message):
        Client("http://127.0.0.1:9", cache_dir=tmp_path / "cache", lock=file)


def test_the_command_writes_and_checks_a_lock_file(
    site: Site,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GEMM_TUNER_CACHE", str(tmp_path / "cache"))
    Path("layers.csv").write_text("name,m,n,k,epilogue\na,8,32,16,bias+relu\nb,1,2,3,\n")
    Path("more.csv").write_text("name,m,n,k\nc,1,2,4\n")
    with site.serving() as address:
        assert run(["lock", "--shapes", "layers.csv", "--url", address]) == 0
    locked = Path("gemm-tuner.lock").read_text()
    offline = ["--frozen", "--offline", "--url", address]

    assert run(["lock", "--shapes", "layers.csv", *offline]) == 0
    assert run(["lock", "--shapes", "more.csv", *offline]) == ANSWER_IS_NO
    assert run(["lock", "--shapes", "more.csv", "--url", "http://127.0.0.1:9"]) == (
        SOMETHING_IS_MISSING
    )

    said = capsys.readouterr()
    assert "gemm-tuner.lock: 1 layer with a kernel, 1 for which a library computes" in said.out
    assert "names nothing for 'f32 1x2x4 nk none'" in said.err
    assert "nothing was written" in said.err
    assert Path("gemm-tuner.lock").read_text() == locked


def test_a_layer_gets_what_is_locked_for_some_m_and_asks_for_the_others(
    site: Site, build: Build, tmp_path: Path
) -> None:
    file, newer = _locked(site, tmp_path), tmp_path / "newer.lock"
    keep_trial(site.repository, build, cpu=detect_cpu(), speed=0.5)

    def layer_of(client: Client) -> list[type]:
        layer = client.layer(PROBLEM.n, PROBLEM.k, m=[4, 8], epilogue=PROBLEM.epilogue.text)
        return sorted((type(one) for one in layer.kernels), key=lambda kind: kind.__name__)

    with site.serving() as address:
        free = layer_of(Client(address, cache_dir=tmp_path / "free"))
        client = Client(address, cache_dir=tmp_path / "cache", lock=file)
        locked = layer_of(client)
        client.write_lock(newer)
    away = layer_of(Client(address, cache_dir=tmp_path / "cache", lock=file))
    frozen = layer_of(Client(address, cache_dir=tmp_path / "cache", lock=newer, frozen=True))

    assert free == [FallbackKernel]
    for found in (locked, away, frozen):
        assert [one.__name__ for one in found] == ["FallbackKernel", "Kernel"]
    assert "f32 4x32x16 nk bias+relu" in newer.read_text()


def _with_kernels_that_are_not_cached(file: Path) -> list[str]:
    """Lock the kernel of `PROBLEM` for other problems too, and return these."""
    *_others, line = file.read_text().splitlines()
    problems = [PROBLEM.text.replace(" 8x", f" {m}x") for m in (5, 6, 7)]
    rows = [json.loads(line) | {"problem": problem} for problem in problems]
    file.write_text(file.read_text() + "".join(f"{json.dumps(row)}\n" for row in rows))
    return problems


def test_locked_kernels_that_are_asked_for_at_once_share_a_deadline(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _locked(site, tmp_path)
    problems = _with_kernels_that_are_not_cached(file)
    begun: list[float] = []
    begin = Connections.session

    def count(connections: Connections, timeout_s: float) -> Session:
        begun.append(timeout_s)
        return begin(connections, timeout_s)

    monkeypatch.setattr(Connections, "session", count)
    client = Client("http://127.0.0.1:9", cache_dir=tmp_path / "cache", lock=file, timeout_s=7.0)
    client.kernels([*problems, PROBLEM])
    client.ask_anew()
    client.layer(PROBLEM.n, PROBLEM.k, m=[5, 6, 7, 8], epilogue=PROBLEM.epilogue.text)

    assert begun == [7.0, 7.0]


def test_a_service_that_is_away_is_not_asked_for_each_locked_kernel(
    site: Site, tmp_path: Path
) -> None:
    file = _locked(site, tmp_path)
    first, second, _third = _with_kernels_that_are_not_cached(file)
    client = Client("http://127.0.0.1:9", cache_dir=tmp_path / "cache", lock=file)

    assert "does not answer" in client.kernel(first).reason
    assert "and not again for this" in client.kernel(second).reason
