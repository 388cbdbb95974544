"""A bundle: C and C++ programs compute with it what Python computes, bit for bit."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from served import CANDIDATE, FEW, PROBLEM, Site, keep_trial

from gemm_tuner.build.compile import Build, compile_kernel
from gemm_tuner.build.toolchain import find_toolchain
from gemm_tuner.bundle.collect import BundledKernel, collect
from gemm_tuner.bundle.write import write_bundle
from gemm_tuner.cli.main import run
from gemm_tuner.codegen.render import render
from gemm_tuner.domain.candidate import Candidate
from gemm_tuner.domain.context import ExecutionContext
from gemm_tuner.domain.operation import Operation
from gemm_tuner.domain.problem import Problem
from gemm_tuner.domain.rows import Rows
from gemm_tuner.machine.detect import detect_cpu
from gemm_tuner.runtime.load import load_kernel
from gemm_tuner.space.catalog import family_named

EXAMPLES = Path(__file__).parents[2] / "examples" / "bundle"


LAYER = "f32 *x32x16 nk bias+relu"


HERE = detect_cpu()


CONTEXT = ExecutionContext()


OF_THE_C_LIBRARY = {"libc", "libm", "libdl"}


# The C++ drivers compile C too when they are told the language.
AS_C = ("-x", "c", "-std=c11")


def object_of(source: Path, bundle: Path, *flags: str) -> Path:
    """Return a source, compiled as strict C or C++."""
    made = bundle.parent / f"{source.stem}.o"
    strict = ["-O2", "-Wall", "-Wextra", "-Werror", f"-I{bundle}", *flags]
    command = [*find_toolchain().command, *strict, "-c", str(source), "-o", str(made)]
    subprocess.run(command, check=True)
    return made


def build_program(bundle: Path, source: Path, *flags: str) -> Path:
    """Return an example, linked with the bundle."""
    program = bundle.parent / source.stem
    dispatcher = object_of(bundle / "gemm_tuner_bundle.c", bundle, *AS_C)
    objects = [str(object_of(source, bundle, *flags)), str(dispatcher)]
    link = [*find_toolchain().command, *objects, "-pthread", "-ldl", "-o", str(program)]
    subprocess.run(link, check=True)
    return program


def build_c(bundle: Path) -> Path:
    """Return the example in C."""
    return build_program(bundle, EXAMPLES / "call_bundle.c", *AS_C)


def call(
    program: Path, bundle: Path, m: int, *more: str, layer: str = LAYER
) -> subprocess.CompletedProcess[str]:
    """Run an example, which writes its result beside the bundle."""
    sizes = [str(m), str(PROBLEM.n), str(PROBLEM.k)]
    arguments = [str(bundle / "kernels"), layer, *sizes, str(bundle.parent / "y"), *more]
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def numbers(count: int, seed: int) -> np.ndarray:
    """Return the numbers that the examples make."""
    values = np.empty(count, np.float32)
    for i in range(count):
        seed = (seed * 1664525 + 1013904223) % 2**32
        values[i] = np.float32(seed >> 8) / np.float32(8388608) - np.float32(1)
    return values


def computed_in_python(build: Build, m: int, threads: int = 1) -> bytes:
    """Return the bytes of the result of a kernel."""
    n, k = PROBLEM.n, PROBLEM.k
    kernel = load_kernel(build.binary, artifact=build.artifact, cpu=HERE)
    w = numbers(n * k, 2).reshape(n, k)
    packed = kernel.pack(w) if kernel.problem.operation.packs_ahead else w
    x, bias = numbers(m * k, 1).reshape(m, k), numbers(n, 3)
    y = kernel(x, packed, bias=bias, threads=threads)
    assert isinstance(y, np.ndarray)
    return y.tobytes()


def test_c_computes_what_python_computes(bundle: Path, build: Build, few: Build) -> None:
    program = build_c(bundle)

    for m, kernel in ((8, build), (5, few), (12, few)):
        done = call(program, bundle, m)
        assert done.returncode == 0, done.stderr
        assert (bundle.parent / "y").read_bytes() == computed_in_python(kernel, m)
        assert f'"problem":"{(PROBLEM if kernel is build else FEW).text}"' in done.stdout


def test_a_product_of_two_activations_gets_w_in_the_call(site: Site, tmp_path: Path) -> None:
    problem = replace(PROBLEM, operation=Operation.MATMUL)
    candidate = Candidate.parse("scalar_f32_2x4 mc8_nc32_kc16 jc_ic_jr_ir pack_w")
    family = family_named(candidate.micro_kernel.family)
    source = render(problem, candidate, family)
    build = compile_kernel(source, isa=family.isa, toolchain=find_toolchain())
    keep_trial(site.repository, build, cpu=HERE, speed=10, problem=problem, candidate=candidate)
    layers, folder = tmp_path / "layers.csv", tmp_path / "bundle"
    layers.write_text("name,m,n,k,epilogue,operation\nscores,8,32,16,bias+relu,matmul\n")
    assert run(["bundle", str(layers), str(folder), "--db", site.settings.database_url]) == 0

    done = call(build_c(folder), folder, 8, layer=problem.layer_text)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "y").read_bytes() == computed_in_python(build, 8)
    refused = call(build_c(folder), folder, 9, layer=problem.layer_text)
    assert "there is no kernel for so many rows" in refused.stderr


@pytest.mark.parametrize(("columns", "keys"), [("21", 21), ("1..32", 9)])
def test_attention_gets_keys_and_values_in_the_call(
    site: Site, tmp_path: Path, columns: str, keys: int
) -> None:
    problem = Problem.parse(f"attention f32 8x{columns}x5 scale+causal")
    candidate = Candidate.parse("scalar_f32_2x4 mc8_nc8_kc5 ic_jc_jr_ir pack_w")
    family = family_named(candidate.micro_kernel.family)
    source = render(problem, candidate, family)
    build = compile_kernel(source, isa=family.isa, toolchain=find_toolchain())
    keep_trial(site.repository, build, cpu=HERE, speed=10, problem=problem, candidate=candidate)
    layers, folder = tmp_path / "layers.csv", tmp_path / "bundle"
    words = f"heads,8,{columns},5,scale+causal,attention"
    layers.write_text(f"name,m,n,k,epilogue,operation\n{words}\n")
    assert run(["bundle", str(layers), str(folder), "--db", site.settings.database_url]) == 0
    program = build_program(folder, EXAMPLES / "call_attention.c", *AS_C)

    arguments = [
        str(folder / "kernels"),
        problem.layer_text,
        "8",
        str(keys),
        "5",
        str(tmp_path / "y"),
    ]
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    q = numbers(8 * 2 * 5, 1).reshape(8, 2, 5).swapaxes(0, 1)
    k, v = (numbers(keys * 5, seed).reshape(keys, 5) for seed in (2, 3))
    kernel = load_kernel(build.binary, artifact=build.artifact, cpu=HERE)
    right = np.asarray(kernel(q, k, v, scale=0.5)).swapaxes(0, 1)
    assert (tmp_path / "y").read_bytes() == np.ascontiguousarray(right).tobytes()


def test_threads_of_cpp_compute_what_python_computes(bundle: Path, build: Build) -> None:
    source = EXAMPLES / "call_bundle_threads.cpp"
    program = build_program(bundle, source, "-std=c++17", "-pthread")

    done = call(program, bundle, 8, "4")

    assert done.returncode == 0, done.stderr
    assert (bundle.parent / "y").read_bytes() == computed_in_python(build, 8, threads=3)


def _run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, env=environment or None
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def needed_by(path: Path) -> set[str]:
    """Return the libraries that a library or program asks for."""
    shown = _run("readelf", "--dynamic", path).splitlines()
    return {line.split("[")[1].split(".")[0] for line in shown if "(NEEDED)" in line}


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_kernels_need_nothing_but_the_c_library(bundle: Path) -> None:
    for path in (bundle / "kernels").glob("*.so"):
        assert needed_by(path) <= OF_THE_C_LIBRARY


def test_rows_without_a_kernel_are_left_to_the_caller(bundle: Path) -> None:
    done = call(build_c(bundle), bundle, 13)

    assert done.returncode == 1
    assert "there is no kernel for so many rows" in done.stderr
    assert not (bundle.parent / "y").exists()


_NULLS = """
#include "gemm_tuner_bundle.h"
#include <stdio.h>
#define CHECK(holds) if (!(holds)) return fprintf(stderr, "%s\\n", #holds), 1
int main(int argc, char **argv) {
    char message[64];
    CHECK(argc == 2);
    gemm_tuner_bundle *bundle = gemm_tuner_bundle_open(argv[1], NULL, 0);
    CHECK(bundle != NULL);
    CHECK(gemm_tuner_bundle_open(NULL, message, sizeof message) == NULL);
    CHECK(message[0] == 't');
    CHECK(gemm_tuner_bundle_open(NULL, NULL, 0) == NULL);
    CHECK(gemm_tuner_bundle_find(bundle, NULL) == NULL);
    CHECK(gemm_tuner_bundle_find(NULL, NULL) == NULL);
    CHECK(gemm_tuner_bundle_name(bundle, 1) == NULL);
    gemm_tuner_bundle_close(bundle);
    return 0;
}
"""


def test_where_nothing_is_named_nothing_is_found(bundle: Path) -> None:
    source = bundle.parent / "nulls.c"
    source.write_text(_NULLS)

    _run(build_program(bundle, source, *AS_C), bundle / "kernels")


def test_a_cpu_without_the_features_has_no_kernel(bundle: Path) -> None:
    table = bundle / "gemm_tuner_bundle_table.h"
    text = table.read_text()
    assert text.count(', "",') == 2  # scalar kernels need no feature
    table.write_text(text.replace(', "",', ', "fma no_such_feature",'))
    for library in (bundle / "kernels").glob("*.so"):
        library.unlink()  # nothing of them is loaded

    done = call(build_c(bundle), bundle, 8)

    assert done.returncode == 1
    assert "the weights cannot be packed" in done.stderr


@pytest.mark.parametrize("damage", ["missing", "swapped", "cut"])
def test_a_kernel_that_is_not_the_one_bundled_is_refused(bundle: Path, damage: str) -> None:
    first, second = sorted((bundle / "kernels").glob("*.so"))
    if damage == "missing":
        first.unlink()
    elif damage == "swapped":
        shutil.copyfile(first, second)
    else:
        first.write_bytes(b"\x7fELF")

    done = call(build_c(bundle), bundle, 8)

    assert done.returncode == 1
    assert "the bundle cannot be used: " in done.stderr
    if damage == "swapped":
        assert "is another kernel than was bundled" in done.stderr


def test_rows_at_which_a_library_is_faster_are_left_to_it(
    bundle: Path, site: Site, build: Build, few: Build, layers: Path
) -> None:
    slow = replace(PROBLEM, m=Rows(low=10, high=10))
    keep_trial(site.repository, build, cpu=HERE, speed=0.5, problem=slow)
    with layers.open("a") as file:
        file.write("slow,10,32,16,bias+relu\n")
    assert run(["bundle", str(layers), str(bundle), "--db", site.settings.database_url]) == 0

    program = build_c(bundle)

    assert "there is no kernel for so many rows" in call(program, bundle, 10).stderr
    assert call(program, bundle, 9).returncode == 0
    assert (bundle.parent / "y").read_bytes() == computed_in_python(few, 9)
    assert f"- `{slow.text}`: the baseline is to be used" in (bundle / "README.md").read_text()


@pytest.mark.proof
@pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("pkg-config") and shutil.which("cc")),
    reason="needs cmake, pkg-config and cc",
)
def test_cmake_installs_what_pkg_config_finds(bundle: Path, build: Build, tmp_path: Path) -> None:
    """Staged by DESTDIR, as packages are built, and moved to a place with a blank in its name."""
    staged, moved = tmp_path / "staged", tmp_path / "moved to here"
    _run("cmake", "-S", bundle, "-B", tmp_path / "made", "-DCMAKE_BUILD_TYPE=Release")
    _run("cmake", "--build", tmp_path / "made")
    install = ("cmake", "--install", tmp_path / "made", "--prefix", "/usr")
    _run(*install, **os.environ, DESTDIR=str(staged))
    (staged / "usr").rename(moved)
    (config,) = moved.rglob("gemm_tuner_bundle.pc")

    def asked(*options: str) -> Sequence[str]:
        return shlex.split(
            _run("pkg-config", *options, "gemm_tuner_bundle", PKG_CONFIG_PATH=str(config.parent))
        )

    program = tmp_path / "installed"
    flags = asked("--cflags", "--libs")
    _run("cc", "-std=c11", EXAMPLES / "call_bundle.c", *flags, "-o", program)
    kernels = " ".join(asked("--variable=kernels"))
    sizes = ["8", str(PROBLEM.n), str(PROBLEM.k)]
    _run(program, kernels, LAYER, *sizes, tmp_path / "y")

    assert (tmp_path / "y").read_bytes() == computed_in_python(build, 8)
    assert needed_by(program) <= OF_THE_C_LIBRARY


_PLUGIN = """
#include "gemm_tuner_bundle.h"
#include <string.h>
/* Open the bundle, and return how many of its layers are found by their names. */
__attribute__((visibility("default"))) int count(const char *folder) {
    gemm_tuner_bundle *bundle = gemm_tuner_bundle_open(folder, NULL, 0);
    int found = 0;
    if (bundle == NULL) return -1;
    for (size_t i = 0; i < gemm_tuner_bundle_layers(bundle); ++i)
        found += gemm_tuner_bundle_find(bundle, gemm_tuner_bundle_name(bundle, i)) != NULL;
    found += gemm_tuner_bundle_find(bundle, "no such layer") != NULL;
    found += gemm_tuner_layer_describe(NULL, 8) != NULL;
    found += gemm_tuner_layer_pack(NULL, NULL) != NULL;
    found += gemm_tuner_layer_parts(gemm_tuner_bundle_find(bundle, "x"), -1) != 0;
    gemm_tuner_bundle_close(bundle);
    return found;
}
"""


_MANY = """
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
static int (*counts[2])(const char *);
static char **arguments;
static void *open_often(void *unused) {
    (void)unused;
    for (int i = 0; i < 20; ++i)
        for (int plugin = 0; plugin < 2; ++plugin)
            if (counts[plugin](arguments[2 + 2 * plugin]) != atoi(arguments[5 + plugin])) abort();
    return NULL;
}
int main(int argc, char **argv) {
    pthread_t threads[16];
    if (argc != 7) return 2;
    arguments = argv;
    for (int i = 0; i < 2; ++i) {
        void *plugin = dlopen(argv[1 + 2 * i], RTLD_NOW | RTLD_GLOBAL);
        if (plugin == NULL) return puts(dlerror()), 1;
        *(void **)&counts[i] = dlsym(plugin, "count");
    }
    for (int i = 0; i < 16; ++i) pthread_create(&threads[i], NULL, open_often, NULL);
    for (int i = 0; i < 16; ++i) pthread_join(threads[i], NULL);
    return 0;
}
"""


@pytest.mark.proof
@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("cc")), reason="needs cmake and cc")
def test_two_plugins_with_a_bundle_each_are_opened_by_many_threads(
    bundle: Path, site: Site, tmp_path: Path
) -> None:
    """By `find_package`, the installed tree somewhere else, and all symbols of plugins global."""
    kernels, missing = collect(site.repository, [PROBLEM], cpu=HERE, context=CONTEXT)
    other = tmp_path / "other bundle"
    write_bundle(other, [replace_layer(kernels[0])], missing, cpu=HERE, context=CONTEXT)
    plugins = [plugin_of(one, tmp_path / f"plugin {one.name}") for one in (bundle, other)]
    (tmp_path / "many.c").write_text(_MANY)
    _run("cc", tmp_path / "many.c", "-pthread", "-ldl", "-o", tmp_path / "many")

    arguments = [word for plugin in plugins for word in plugin]
    _run(tmp_path / "many", *arguments, 1, 1)


def replace_layer(kernel: BundledKernel) -> BundledKernel:
    """Return a kernel under the name of a layer that the other bundle does not have."""
    problem = Problem.parse("f32 8x32x16 nk bias")
    return replace(kernel, verdict=replace(kernel.verdict, problem=problem))


def plugin_of(bundle: Path, made: Path) -> tuple[Path, Path]:
    """Return a library with a bundle in it, built with CMake, and the folder of its kernels."""
    _run("cmake", "-S", bundle, "-B", made / "bundle")
    _run("cmake", "--build", made / "bundle")
    _run("cmake", "--install", made / "bundle", "--prefix", made / "installed")
    (made / "plugin.c").write_text(_PLUGIN)
    (made / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\n"
        "project(plugin LANGUAGES C)\n"
        "find_package(gemm_tuner_bundle 1 REQUIRED CONFIG)\n"
        "add_library(plugin SHARED plugin.c)\n"
        "target_link_libraries(plugin PRIVATE gemm_tuner_bundle)\n"
    )
    prefix = f"-DCMAKE_PREFIX_PATH={made / 'installed'}"
    _run("cmake", "-S", made, "-B", made / "built", prefix)
    _run("cmake", "--build", made / "built")
    (folder,) = (made / "installed").rglob("kernels")
    return made / "built" / "libplugin.so", folder


def test_the_layer_of_a_problem_has_its_name() -> None:
    assert Problem.parse(LAYER.replace("*", "8")) == PROBLEM
    assert CANDIDATE.micro_kernel.family.startswith("scalar")
