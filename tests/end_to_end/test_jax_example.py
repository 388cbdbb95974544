"""JAX calls the kernels of a bundle by a custom call of XLA, as the example shows."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from served import Site, keep_trial

from gemm_tuner.build.compile import Build
from gemm_tuner.cli.main import run
from gemm_tuner.machine.detect import detect_cpu

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "jax" / "linear.py"
LAYER = "f32 *x32x16 nk bias+relu"

# In a process of its own, since JAX starts threads, and forks of such a process may hang.
OF_ONE_BUNDLE = """
import sys, jax, jax.numpy as jnp, numpy as np
sys.path.insert(0, sys.argv[1])
from linear import Bundle, Path, TARGET
draw = np.random.default_rng(1)
w, bias, x = (draw.standard_normal(s, np.float32) for s in ((32, 16), (32,), (3, 5, 8, 16)))
plain = lambda x: jax.nn.relu(x @ w.T + bias)
bundle = Bundle(Path(sys.argv[2]))
layer = bundle.linear("one", sys.argv[3], w, bias, plain)
second = bundle.linear("two", sys.argv[3], -w, bias, plain)
near = lambda y, expected: np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
called = lambda f, *a: TARGET in jax.jit(f).lower(*a).as_text()
assert called(jax.vmap(jax.vmap(layer)), x)
near(jax.jit(jax.vmap(jax.vmap(layer)))(x), plain(x))        # a batch of 15 products
near(layer(x[0, 0]), plain(x[0, 0]))                         # without jit
near(jax.jit(layer)(x[0, :1]), plain(x[0, :1]))              # three dimensions
near(jax.jit(lambda x: second(layer(x)[:, :16]))(x[0, 0]),
     jax.nn.relu(plain(x[0, 0])[:, :16] @ -w.T + bias))      # one after the other
assert not called(layer, x[0]) and not called(layer, x[0, 0].astype(jnp.bfloat16))
near(jax.jit(layer)(x[0]), plain(x[0]))                      # 40 rows have no kernel
try:
    jax.jit(layer)(x[0, 0].reshape(4, 32))                   # as many elements as 8 rows
    print("another k was taken")
except TypeError:
    pass
y = jax.ShapeDtypeStruct((4, 32), jnp.float32)
for x_of, rows in (((4, 32), 8), ((4, 16), 3), ((3, 16), 1), ((4, 16), 0)):  # of another program
    stale = jax.ffi.ffi_call(TARGET, y)
    try:
        stale(jnp.zeros(x_of), layer="one", rows=np.int64(rows))
        print(x_of, rows, "was computed")
    except Exception as error:
        assert "layer one has another shape or type in this process" in str(error), error
for refused in (
    lambda: bundle.linear("one", sys.argv[3], w, bias, plain),
    lambda: bundle.linear("three", sys.argv[3], w.T, bias, plain),
    lambda: bundle.linear("three", sys.argv[3], w, bias[:5], plain),
    lambda: bundle.linear("three", "f32 *x32x16 nk bias", w, bias, plain),
    lambda: bundle.linear("three", "f32 *x32x16 kn", w, bias, plain),
    lambda: Bundle(Path("nowhere")),
):
    try:
        refused()
    except SystemExit as stopped:
        print(stopped)
"""


@pytest.fixture
def bundle(bare_site: Site, build: Build, tmp_path: Path) -> Path:
    """Return a bundle of one kernel, for eight rows and two threads."""
    keep_trial(bare_site.repository, build, cpu=detect_cpu(), speed=10, threads=2)
    layers = tmp_path / "layers.csv"
    layers.write_text("name,m,n,k,epilogue\none,8,32,16,bias+relu\n")
    folder = tmp_path / "bundle"
    url = bare_site.settings.database_url
    assert run(["bundle", str(layers), str(folder), "--db", url, "--threads", "2"]) == 0
    return folder


def in_jax(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python, where JAX finds a compiler."""
    environment = os.environ | {"CC": "gcc", "CXX": "g++", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )


def test_jax_calls_kernels_and_leaves_to_xla_what_has_none(bundle: Path) -> None:
    shown = in_jax(EXAMPLE, bundle, LAYER, "8", cwd=bundle.parent)
    assert shown.returncode == 0, shown.stderr
    assert "m = 8 is computed by a kernel, and is what XLA computes" in shown.stdout

    done = in_jax("-c", OF_ONE_BUNDLE, EXAMPLE.parent, bundle, LAYER, cwd=bundle.parent)
    assert done.returncode == 0, done.stderr
    needed = f"layer '{LAYER}' has weights (32, 16) and a bias (32,), not"
    assert done.stdout.splitlines() == [
        f"layer '{LAYER}': a layer with this name was added before",
        f"{needed} (16, 32) and (32,): pass others.",
        f"{needed} (32, 16) and (5,): pass others.",
        "layer 'f32 *x32x16 nk bias': the bundle has no such layer",
        "layer 'f32 *x32x16 kn' is not called from here: give one such as 'bf16 *x32x16 nk bias'.",
        "nowhere is no bundle: make one with gemm-tuner bundle layers.csv nowhere.",
    ]
