"""What sets an earlier trial aside, and what does not."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from jinja2 import ChoiceLoader, DictLoader
from samples import CONTEXT, CPU, make_artifact, make_trial

from gemm_tuner.build import compile as build
from gemm_tuner.build.toolchain import Toolchain
from gemm_tuner.codegen import render as codegen
from gemm_tuner.codegen.environment import environment
from gemm_tuner.domain import operation
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.kept_panel import keeps_panel
from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.recipe import Recipe
from gemm_tuner.domain.record import Outcome, Stage, Trial
from gemm_tuner.resources import templates_dir, tuning_db_dir
from gemm_tuner.space.candidates import Space
from gemm_tuner.space.catalog import family_named
from gemm_tuner.store.repository import Repository
from gemm_tuner.store.wire.record import dump_record, parse_record
from gemm_tuner.tuning import generator
from gemm_tuner.tuning.earlier import earlier_trials, former_trials, relevant_trials
from gemm_tuner.tuning.generator import generator_digest, generator_files, generator_version
from gemm_tuner.tuning.standing import rendered_sha256, stands

GCC = Toolchain(name="gcc", version="12.2.0", command=("g++",))
PROBLEM = Problem.parse("f32 8x48x64 nk bias")
CANDIDATE = Candidate.parse("avx512_f32_8x48 mc8_nc48_kc64 jc_ic_jr_ir pf4096")
ISA = family_named("avx512_f32").isa
Change = Callable[[pytest.MonkeyPatch], None]
BEFORE = "gemm-tuner 0.0.1+before"


@pytest.fixture(autouse=True)
def _forget_what_was_rendered() -> Iterator[None]:
    rendered_sha256.cache_clear()
    yield
    rendered_sha256.cache_clear()


def recipe() -> Recipe:
    source = codegen.render(PROBLEM, CANDIDATE, family_named("avx512_f32"))
    return Recipe(
        source_sha256=source.sha256, toolchain=GCC.text, flags=build.compile_flags(ISA, GCC)
    )


def trial_of(made_from: Recipe, **changes: object) -> Trial:
    """Return a confirming trial, by an earlier generator, of what was made of a recipe."""
    artifact = make_artifact(
        required_isa=ISA,
        toolchain=made_from.toolchain,
        source_sha256=made_from.source_sha256,
        flags=made_from.flags,
    )
    trial = make_trial(
        problem=PROBLEM,
        candidate=CANDIDATE,
        toolchain=made_from.toolchain,
        generator=BEFORE,
        artifact=artifact,
    )
    return replace(trial, **changes)  # type: ignore[arg-type]  # fields by name


def failure_of(made_from: Recipe | None) -> Trial:
    """Return a trial, by an earlier generator, in which the compiler refused what it was given."""
    return make_trial(
        problem=PROBLEM,
        candidate=CANDIDATE,
        toolchain=GCC.text,
        generator=BEFORE,
        stage=Stage.RACE,
        outcome=Outcome.COMPILE_FAILED,
        artifact=None,
        refused=made_from,
        measurement=None,
        conditions=None,
    )


def change_template(patch: pytest.MonkeyPatch) -> None:
    """Add a comment to one template that every kernel has a part of."""
    name = "gemm.cpp.j2"
    text = (templates_dir() / name).read_text() + "// changed\n"
    changed = environment().overlay(
        loader=ChoiceLoader([DictLoader({name: text}), environment().loader or DictLoader({})])
    )
    patch.setattr(codegen, "environment", lambda: changed)


def change_domain(patch: pytest.MonkeyPatch) -> None:
    """Let `domain/kept_panel.py` decide otherwise."""
    patch.setattr(codegen, "keeps_panel", lambda *asked: not keeps_panel(*asked))


def change_flags(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(build, "_KERNEL_FLAGS", (*build._KERNEL_FLAGS, "-O3"))


def change_flags_of_compiler(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(build._TOOLCHAIN_FLAGS, "gcc", ("-Wno-psabi",))


def change_abi(patch: pytest.MonkeyPatch) -> None:
    facts = operation._FACTS[Operation.LINEAR]
    changed = replace(facts, abi_version=facts.abi_version + 1)
    patch.setitem(operation._FACTS, Operation.LINEAR, changed)


CHANGES: list[Change] = [
    change_template,
    change_domain,
    change_flags,
    change_flags_of_compiler,
    change_abi,
]


def test_what_would_be_made_of_the_same_stands_whatever_generator_made_it() -> None:
    assert stands(trial_of(recipe()), GCC)
    assert stands(failure_of(recipe()), GCC)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_made_of_something_else_now_is_set_aside(
    monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    proved, refused = trial_of(recipe()), failure_of(recipe())

    change(monkeypatch)

    assert not stands(proved, GCC)
    assert not stands(refused, GCC)


def test_another_version_of_the_compiler_sets_a_trial_aside() -> None:
    newer = replace(GCC, version="12.3.0")

    assert not stands(trial_of(recipe()), newer)
    assert not stands(failure_of(recipe()), newer)


def test_a_kernel_of_another_abi_is_set_aside() -> None:
    trial = trial_of(recipe(), generator=generator_version())
    assert trial.artifact is not None

    of_old = replace(
        trial, artifact=replace(trial.artifact, abi_version=trial.artifact.abi_version - 1)
    )

    assert stands(trial, GCC)
    assert not stands(of_old, GCC)


@pytest.mark.parametrize("change", [change_flags, change_flags_of_compiler])
def test_flags_count_also_where_the_generator_is_the_same(
    monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    trial = trial_of(recipe(), generator=generator_version())

    change(monkeypatch)

    assert not stands(trial, GCC)


def test_a_record_without_flags_stands_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_of(replace(recipe(), flags=()))
    stood = stands(trial, GCC)

    change_flags(monkeypatch)

    assert stood
    assert not stands(trial, GCC)


def test_a_failure_that_does_not_say_what_was_refused_is_tried_again() -> None:
    assert not stands(failure_of(None), GCC)


def test_a_candidate_that_no_family_has_any_more_is_set_aside() -> None:
    gone = Candidate.parse(CANDIDATE.text.replace("avx512_f32", "avx512_of_old"))

    assert not stands(trial_of(recipe(), candidate=gone), GCC)


def test_what_another_generator_confirmed_counts_as_a_race(repository: Repository) -> None:
    by_this = trial_of(recipe(), generator=generator_version())
    for trial in (trial_of(recipe()), by_this, trial_of(replace(recipe(), source_sha256="0" * 64))):
        repository.add_trial(trial)

    earlier = earlier_trials(repository, PROBLEM, CPU, GCC)
    relevant = relevant_trials(earlier, Space(problem=PROBLEM, cpu=CPU), CONTEXT, "onednn 3.2.0")

    assert [trial.generator for trial in earlier] == [BEFORE, generator_version()]
    assert [trial.stage for trial in relevant] == [Stage.RACE, Stage.CONFIRM]


def test_records_from_elsewhere_are_a_hint_whatever_generator_made_them(
    repository: Repository,
) -> None:
    by_this = trial_of(recipe(), generator=generator_version())
    repository.add_trial(by_this)
    from_elsewhere = replace(by_this, created_at=by_this.created_at + timedelta(days=1))
    repository.add_imported([from_elsewhere])

    assert former_trials(repository, PROBLEM, CPU) == [from_elsewhere]
    assert earlier_trials(repository, PROBLEM, CPU, GCC) == [by_this]


def test_records_say_what_their_kernels_were_made_of() -> None:
    for trial in (trial_of(recipe()), failure_of(recipe())):
        read = parse_record(dump_record(trial))

        assert read.recipe == trial.recipe == recipe()


def test_shipped_records_stay_what_they_are() -> None:
    """An identity is made of the text: a record of old is written as it was read."""
    files = list(tuning_db_dir().glob("*.jsonl"))

    assert files
    for path in files:
        with path.open() as lines:
            line = next(lines).rstrip("\n")
        assert dump_record(parse_record(line)) == line


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package and the templates."""
    folder = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "_templates", "_tuning_db")
    shutil.copytree(generator._PACKAGE, folder / "gemm_tuner", ignore=ignored)
    shutil.copytree(templates_dir(), folder / "templates")
    return folder


@pytest.fixture(scope="module")
def digest(original: Path) -> str:
    return _digest_of(original)


@pytest.mark.parametrize(
    "name",
    [
        "templates/gemm.cpp.j2",
        "templates/abi/gemm_tuner.h",
        "gemm_tuner/domain/blocking.py",
        "gemm_tuner/domain/kept_panel.py",
        "gemm_tuner/domain/problem.py",
        "gemm_tuner/space/catalog.py",
        "gemm_tuner/space/cores.csv",
        "gemm_tuner/codegen/packing.py",
        "gemm_tuner/build/compile.py",
        "gemm_tuner/strategies/local_search.py",
        "gemm_tuner/strategies/ranker.py",
    ],
)
def test_each_input_of_the_generator_counts(original: Path, digest: str, name: str) -> None:
    assert _digest_with(original, name) != digest


@pytest.mark.parametrize(
    "name",
    [
        "gemm_tuner/cli/sweep.py",
        "gemm_tuner/tuning/sweep.py",
        "gemm_tuner/bench/measure.py",
        "gemm_tuner/store/repository.py",
        "gemm_tuner/domain/verdict.py",
    ],
)
def test_nothing_else_is_of_the_generator(original: Path, digest: str, name: str) -> None:
    assert _digest_with(original, name) == digest


def test_every_module_that_the_generator_loads_counts() -> None:
    """The interpreter itself says what the renderer, the compiler and the search import."""
    roots = ", ".join(generator._ROOTS)
    code = (
        f"import sys, {roots}\n"
        "names = [name for name in sys.modules if name.startswith('gemm_tuner.')]\n"
        "print(*(sys.modules[name].__file__ for name in names))"
    )

    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    ).stdout.split()

    modules = {Path(path) for path in loaded if not path.endswith("__init__.py")}
    assert modules
    assert modules <= set(generator_files(generator._PACKAGE))


def test_the_version_is_found_while_another_thread_makes_a_syntax_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CPython 3.11 fails where two make one at once: none is made here."""
    monkeypatch.delattr(ast, "parse")
    generator_version.cache_clear()

    assert generator_version().startswith("gemm-tuner ")


def _digest_of(folder: Path) -> str:
    return generator_digest(folder / "gemm_tuner", folder / "templates")


def _digest_with(folder: Path, name: str) -> str:
    """Return the digest with a line more in one file."""
    path = folder / name
    before = path.read_text()
    path.write_text(before + "\n# changed\n")
    try:
        return _digest_of(folder)
    finally:
        path.write_text(before)
