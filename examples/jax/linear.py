"""Call the kernels of a bundle from JAX: under jit and vmap, on the threads of XLA.

    pip install jax
    gemm-tuner sweep --shapes layers.csv
    gemm-tuner bundle layers.csv bundle
    python examples/jax/linear.py bundle 'f32 *x3072x768 nk bias+relu' 128

The layer is y = relu(x @ w.T + bias). What has no kernel, XLA computes.
"""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

SOURCE = Path(__file__).with_name("gemm_tuner_jax.cpp")
TARGET = "gemm_tuner_linear"
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
LAYER = re.compile(r"(?P<dtype>f32|bf16) \*x(?P<n>[1-9]\d*)x(?P<k>[1-9]\d*) nk bias\b.*")


class Bundle:
    """The layers of a bundle, to be called in JAX."""

    def __init__(self, folder: Path) -> None:
        """Build the custom call once, load it, and open the kernels."""
        self._library = ctypes.CDLL(str(built(folder)))
        self._library.gemm_tuner_bundle_open.restype = ctypes.c_void_p
        self._library.gemm_tuner_bundle_find.restype = ctypes.c_void_p
        self._library.gemm_tuner_layer_describe.restype = ctypes.c_char_p
        self._library.gemm_tuner_jax_add.restype = ctypes.c_char_p
        message = ctypes.create_string_buffer(512)
        opened = self._library.gemm_tuner_bundle_open(
            str(folder / "kernels").encode(), message, 512
        )
        if opened is None:
            sys.exit(f"the bundle cannot be used: {message.value.decode()}")
        self._bundle = ctypes.c_void_p(opened)
        jax.ffi.register_ffi_target(
            TARGET, jax.ffi.pycapsule(self._library.gemm_tuner_linear), platform="cpu"
        )

    def linear(
        self, name: str, text: str, w: np.ndarray, bias: np.ndarray, otherwise: Callable
    ) -> Callable[[jax.Array], jax.Array]:
        """Return a function of x (..., k), for jit and vmap; it is for inference.

        Args:
            name: of this layer in the process; compiled programs find it by that.
            text: the layer in the bundle, `f32 *x3072x768 nk bias+relu`.
            w: its weights, (n, k), of any floats.
            bias: n elements.
            otherwise: computes the layer by JAX, for numbers of rows without a kernel.
        """
        n, k, dtype = facts_of(text)
        w, bias = np.ascontiguousarray(w, dtype), np.ascontiguousarray(bias, dtype)
        if w.shape != (n, k) or bias.shape != (n,):
            sys.exit(
                f"layer {text!r} has weights {(n, k)} and a bias {(n,)}, not {w.shape} and "
                f"{bias.shape}: pass others."
            )
        layer = ctypes.c_void_p(self._library.gemm_tuner_bundle_find(self._bundle, text.encode()))
        wrong = self._library.gemm_tuner_jax_add(
            name.encode(), self._bundle, text.encode(), w.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(n), ctypes.c_int64(k), ctypes.c_size_t(w.itemsize),
            bias.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(bias.nbytes),
        )  # fmt: skip
        if wrong is not None:
            sys.exit(f"layer {text!r}: {wrong.decode()}")

        def call(x: jax.Array) -> jax.Array:
            if x.dtype != w.dtype or x.shape[-1:] != (k,):
                return otherwise(x)  # which refuses another k
            rows = x.size // k
            if self._library.gemm_tuner_layer_describe(layer, ctypes.c_int64(rows)) is None:
                return otherwise(x)
            y = jax.ShapeDtypeStruct((*x.shape[:-1], n), x.dtype)
            kernel = jax.ffi.ffi_call(TARGET, y, vmap_method="broadcast_all")
            return kernel(x, layer=name, rows=np.int64(rows))

        return call


def facts_of(text: str) -> tuple[int, int, type]:
    """Return n, k and the type of a layer."""
    layer = LAYER.fullmatch(text)
    if layer is None:
        sys.exit(
            f"layer {text!r} is not called from here: give one such as 'bf16 *x32x16 nk bias'."
        )
    return int(layer["n"]), int(layer["k"]), DTYPES[layer["dtype"]]


def built(bundle: Path) -> Path:
    """Return the library of the custom call, compiled with the dispatcher of the bundle."""
    dispatcher = bundle / "gemm_tuner_bundle.c"
    if not dispatcher.is_file():
        sys.exit(
            f"{bundle} is no bundle: make one with gemm-tuner bundle layers.csv {bundle.name}."
        )
    made = bundle.parent / "libgemm_tuner_jax.so"
    sources = max(each.stat().st_mtime for each in (dispatcher, SOURCE))
    if made.is_file() and made.stat().st_mtime > sources:
        return made
    in_c = made.with_name("gemm_tuner_bundle.o")
    flags = ["-O2", "-fPIC", f"-I{bundle}", f"-I{jax.ffi.include_dir()}"]
    link = ["-shared", in_c, "-ldl", "-o", made]
    c, cxx = os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")
    subprocess.run([c, "-std=c11", *flags, "-c", dispatcher, "-o", in_c], check=True)
    subprocess.run([cxx, "-std=c++17", *flags, SOURCE, *link], check=True)
    return made


def main(folder: str, text: str, rows: str) -> None:
    """Compute the layer inside jit, with kernels and by XLA alone, and compare."""
    n, k, dtype = facts_of(text)
    draw = np.random.default_rng(0)
    w, bias, x = (draw.standard_normal(shape) for shape in ((n, k), (n,), (int(rows), k)))

    def plain(x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ jnp.asarray(w, dtype).T + jnp.asarray(bias, dtype))

    layer = Bundle(Path(folder).absolute()).linear("first", text, w, bias, plain)
    compiled = jax.jit(lambda x: jnp.tanh(layer(x)).mean(axis=-1))
    expected = jax.jit(lambda x: jnp.tanh(plain(x)).mean(axis=-1))

    x = jnp.asarray(x, dtype)
    by = "a kernel" if TARGET in compiled.lower(x).as_text() else "XLA"
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(compiled(x), expected(x), rtol=tolerance, atol=tolerance)
    print(f"{text} with m = {rows} is computed by {by}, and is what XLA computes")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: linear.py BUNDLE LAYER ROWS")
    main(*sys.argv[1:])
