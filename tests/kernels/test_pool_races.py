"""The pool in C under ThreadSanitizer: callers, packers and who configures it, all at once."""

import subprocess
from pathlib import Path
from shutil import which

import pytest

from gemm_tuner.resources import templates_dir
from gemm_tuner.runtime import pool

_NATIVE = Path(pool.__file__).parent / "native"

_CALLERS = """
#include "pool.h"
#include <pthread.h>
#include <stdlib.h>

enum { CALLERS = 4, CALLS = 500, PHASES = 2, MOST_PARTS = 40 };

typedef struct counts { int32_t calls[PHASES][MOST_PARTS], packed[MOST_PARTS]; } counts;

static int32_t run(const gemm_tuner_args *args, int32_t phase, int32_t part, int32_t parts) {
    counts *counts = args->y;
    if (phase == 1 && counts->calls[0][(part + 1) % parts] != 1) abort(); /* a phase too early */
    counts->calls[phase][part]++;
    return GEMM_TUNER_OK;
}

static int32_t pack(const gemm_tuner_weights *weights, void *packed, int32_t part, int32_t parts) {
    (void)weights, (void)parts;
    ((int32_t *)packed)[part]++;
    return GEMM_TUNER_OK;
}

static void *call(void *given) {
    unsigned seed = *(unsigned *)given;
    for (int i = 0; i < CALLS; i++) {
        const int32_t parts = rand_r(&seed) % MOST_PARTS + 1, threads = rand_r(&seed) % 8 + 1;
        counts counts = {0};
        gemm_tuner_args args = {.y = &counts};
        gemm_tuner_weights weights = {0};
        pool_run(run, &args, PHASES, parts, threads);
        pool_pack(pack, &weights, counts.packed, 0, 1, parts, threads);
        for (int32_t part = 0; part < parts; part++)
            if (counts.calls[0][part] != 1 || counts.calls[1][part] != 1 ||
                counts.packed[part] != 1)
                abort();
        if (i % 50 == 0)
            pool_configure(rand_r(&seed) % 8 + 1, i % 100 ? NULL : (int32_t[8]){0});
    }
    return NULL;
}

int main(void) {
    pthread_t threads[CALLERS];
    unsigned seeds[CALLERS];
    pool_configure(2, NULL);
    for (int i = 0; i < CALLERS; i++) {
        seeds[i] = i + 1;
        pthread_create(&threads[i], NULL, call, &seeds[i]);
    }
    for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], NULL);
}
"""


@pytest.mark.proof
def test_calls_packing_and_configuring_do_not_race(tmp_path: Path) -> None:
    (tmp_path / "callers.c").write_text(_CALLERS)
    compiler = which("gcc")
    if compiler is None:
        pytest.skip("gcc is not installed")
    include = ["-I", str(templates_dir() / "abi"), "-I", str(_NATIVE)]
    sources = ["callers.c", str(_NATIVE / "pool.c"), "-pthread", "-o", "callers"]
    flags = ["-std=c11", "-D_DEFAULT_SOURCE", "-O1", "-g", "-fsanitize=thread"]
    subprocess.run([compiler, *flags, *include, *sources], cwd=tmp_path, check=True)

    # ThreadSanitizer does not bear all random addresses of newer Linux.
    command = ["setarch", "-R", "./callers"]
    completed = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )

    assert completed.returncode == 0, completed.stderr[:4000]
