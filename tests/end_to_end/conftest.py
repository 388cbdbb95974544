"""A real kernel in a real store, in directories of the test's own."""

import shutil
from pathlib import Path

import pytest
from calm import let_nothing_disturb
from linear_parts import Kernels
from served import CANDIDATE, FEW, PROBLEM, Site, keep_trial
from shop import Shop

from gemm_tuner.build.compile import Build, compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.cli.main import run
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import load_kernel
from gemm_tuner.space.catalog import family_named
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.sql.database import open_database


@pytest.fixture(autouse=True)
def calm_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe what is timed beside other tests, except in tests of what is disturbed."""
    if request.node.get_closest_marker("disturbed") is None:
        let_nothing_disturb(monkeypatch)


@pytest.fixture(autouse=True)
def private_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the database and the keys below the test's own folder, and let no worker run beside."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("GEMM_TUNER_WORKERS", "0")
    for variable in ("GEMM_TUNER_DB", "GEMM_TUNER_KEYS", "GEMM_TUNER_COMPILER", "GEMM_TUNER_ISA"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="session")
def build() -> Build:
    """Return a kernel for `PROBLEM` that any CPU can run."""
    family = family_named(CANDIDATE.micro_kernel.family)
    source = render(PROBLEM, CANDIDATE, family)
    return compile_kernel(source, isa=family.isa, toolchain=find_toolchain())


@pytest.fixture
def bare_site(tmp_path: Path, empty_store: Path) -> Site:
    """Return a place whose store is empty."""
    folder = tmp_path / "site"
    folder.mkdir(mode=0o700)
    url = f"sqlite:///{shutil.copy(empty_store, folder)}"
    return Site.at(url, folder / "key.pem", Repository(open_database(url)))


@pytest.fixture
def site(bare_site: Site, build: Build) -> Site:
    """Return a place whose store says that `build` is ten times faster than the baseline."""
    keep_trial(bare_site.repository, build, cpu=detect_cpu(), speed=10)
    return bare_site


@pytest.fixture
def shop(bare_site: Site, build: Build, tmp_path: Path) -> Shop:
    """Return a place where nothing is tuned."""
    return Shop(site=bare_site, build=build, folder=tmp_path)


@pytest.fixture
def kernels(build: Build) -> Kernels:
    """Return a source for layers where nothing is tuned yet."""
    return Kernels(load_kernel(build.binary, artifact=build.artifact, cpu=detect_cpu()))


@pytest.fixture(scope="module")
def few() -> Build:
    """Return a kernel for fewer rows, which reads weights in another layout."""
    candidate = Candidate.parse("scalar_f32_2x8 mc12_nc32_kc16 jc_ic_jr_ir")
    family = family_named(candidate.micro_kernel.family)
    return compile_kernel(
        render(FEW, candidate, family), isa=family.isa, toolchain=find_toolchain()
    )


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    """Return a file of three layers, of which the last has no kernel."""
    path = tmp_path / "layers.csv"
    path.write_text(
        "name,m,n,k,epilogue\none,8,32,16,bias+relu\nfew,1..12,32,16,bias+relu\nnone,8,7,9,none\nneither,2,7,9,none\n"
    )
    return path


@pytest.fixture
def bundle(site: Site, few: Build, layers: Path, tmp_path: Path) -> Path:
    """Return a bundle of two kernels of one layer."""
    keep_trial(
        site.repository,
        few,
        cpu=detect_cpu(),
        speed=10,
        problem=FEW,
        candidate=Candidate.parse("scalar_f32_2x8 mc12_nc32_kc16 jc_ic_jr_ir"),
    )
    folder = tmp_path / "bundle"
    assert run(["bundle", str(layers), str(folder), "--db", site.settings.database_url]) == 0
    return folder


@pytest.fixture
def database(store_url: str) -> str:
    """Return the URL of a database without records."""
    return store_url
