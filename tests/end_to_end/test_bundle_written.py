"""What a bundle holds, and when an older one, or something else, is replaced."""

from hashlib import sha256
from pathlib import Path

import pytest
from restricted import full_disk
from served import FEW, PROBLEM, Site

from gemm_tuner.bundle.collect import collect
from gemm_tuner.bundle.write import write_bundle
from gemm_tuner.cli.main import ANSWER_IS_NO, WRONG_USAGE, run
from gemm_tuner.client.lock import LOCK_FILE, read_lock
from gemm_tuner.domain.context import ExecutionContext, Regime
from gemm_tuner.machine.detect import detect_cpu

LAYER = "f32 *x32x16 nk bias+relu"


def contents_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by their names in it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_the_same_kernels_give_the_same_bytes(
    bundle: Path, site: Site, layers: Path, tmp_path: Path
) -> None:
    rows = layers.read_text().splitlines()
    layers.write_text("\n".join([rows[0], *reversed(rows[1:]), rows[1], ""]))

    again = tmp_path / "deep" / "again"
    assert run(["bundle", str(layers), str(again), "--db", site.settings.database_url]) == 0

    assert contents_of(again) == contents_of(bundle)
    sums = dict(line.split("  ")[::-1] for line in (bundle / "SHA256SUMS").read_text().splitlines())
    found = contents_of(bundle)
    assert sums == {name: sha256(found[name]).hexdigest() for name in found if name != "SHA256SUMS"}


def test_a_bundle_says_what_it_holds(bundle: Path) -> None:
    locked = read_lock(bundle / LOCK_FILE)
    readme = (bundle / "README.md").read_text()

    assert {place[0] for place in locked} == {PROBLEM.text, FEW.text}
    assert "- `f32 8x7x9 nk none`: nothing was tuned" in readme
    assert f"| `{LAYER}` | 1..12 |" in readme
    assert "Apache License" in (bundle / "LICENSE").read_text()
    assert (bundle.stat().st_mode & 0o777) == 0o755


def test_an_older_bundle_is_replaced_with_what_was_built_in_it(
    bundle: Path, site: Site, layers: Path, tmp_path: Path
) -> None:
    before = contents_of(bundle)
    (bundle / "build").mkdir()
    (bundle / "build" / "CMakeCache.txt").touch()

    assert run(["bundle", str(layers), str(bundle), "--db", site.settings.database_url]) == 0

    assert contents_of(bundle) == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "case",
    [
        ("mine.h", "'mine.h' in it is of something else"),
        ("kernels/mine.so", "'kernels/mine.so' in it is of something else"),
        ("build/mine", "'build' in it is of something else"),
        ("SHA256SUMS", "it is no bundle"),
    ],
)
def test_a_folder_with_something_else_is_not_replaced(
    bundle: Path,
    site: Site,
    layers: Path,
    case: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, why = case
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).write_text("mine")
    words = ["bundle", str(layers), str(bundle), "--db", site.settings.database_url]

    assert run(words) == WRONG_USAGE

    assert why in capsys.readouterr().err
    assert (bundle / name).read_text() == "mine"


def test_links_and_files_are_not_replaced(
    bundle: Path, site: Site, layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(bundle)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()

    for name, why in (("link", " but a link"), ("dangling", " but a link"), ("file", ";")):
        place = str(tmp_path / name)
        words = ["bundle", str(layers), place, "--db", site.settings.database_url]
        assert run(words) == WRONG_USAGE
        assert f"it is no folder{why}" in capsys.readouterr().err


def test_others_can_read_a_bundle_and_not_write_it(bundle: Path) -> None:
    modes = {path.stat().st_mode & 0o777 for path in bundle.rglob("*") if path.is_file()}

    assert modes == {0o644}
    assert (bundle / "kernels").stat().st_mode & 0o777 == 0o755


def test_without_a_kernel_nothing_is_written(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.csv"
    path.write_text("name,m,n,k\nnone,8,7,9\n")

    code = run(["bundle", str(path), str(tmp_path / "out"), "--db", site.settings.database_url])

    assert code == ANSWER_IS_NO
    assert "No kernel for f32 8x7x9 nk none: nothing was tuned" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_regime_in_which_a_layer_was_tuned_is_told(site: Site) -> None:
    asked = ExecutionContext(regime=Regime.COLD_WEIGHTS)

    kernels, [missing] = collect(site.repository, [PROBLEM], cpu=detect_cpu(), context=asked)

    assert not kernels
    assert missing.reason == "it was tuned for hot, 1 thread alone; give --regime hot."


def test_a_full_disk_leaves_the_older_bundle(bundle: Path, site: Site) -> None:
    before = contents_of(bundle)
    kernels, missing = collect(
        site.repository, [PROBLEM], cpu=detect_cpu(), context=ExecutionContext()
    )

    with full_disk(), pytest.raises(Exception, match="cannot be written"):
        write_bundle(bundle, kernels, missing, cpu=detect_cpu(), context=ExecutionContext())

    assert contents_of(bundle) == before
    assert not [path for path in bundle.parent.iterdir() if path.name.startswith(".bundle-")]
