"""torch.compile by Inductor, with frozen weights."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from gemm_tuner.models.row import Built, Prepared, Way, Work, tensors_of

MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
CPP_WRAPPER = {"cpp_wrapper": True}
FROZEN = {"freezing": "on", "guards": "none on modules"}


def prepare_compiled(
    options: Mapping[str, object], work: Work, backend: str = "inductor"
) -> Prepared:
    """Return a model under torch.compile with some options, its weights frozen.

    Modules are not looked at before each call, which takes 2 ms for hundreds of layers.
    """
    torch = import_module("torch")
    inductor: Any = import_module("torch._inductor.config")
    inductor.freezing = True
    built = work.built
    chosen = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe, **options}
    module = torch.compile(built.module, backend=backend, options=chosen)
    compiled = Built(module=module, inputs=built.inputs)
    return Prepared(call=compiled.call, outputs=tensors_of, plain=built)


def _max_autotune(work: Work) -> Prepared:
    inductor: Any = import_module("torch._inductor")
    return prepare_compiled(inductor.list_mode_options(MAX_AUTOTUNE), work)


ROWS = (
    Way(
        name="compile",
        wheel="torch",
        prepare=partial(prepare_compiled, {}),
        settings=FROZEN,
    ),
    Way(
        name="cpp-wrapper",
        wheel="torch",
        prepare=partial(prepare_compiled, CPP_WRAPPER),
        settings={**FROZEN, "cpp_wrapper": "on"},
    ),
    Way(
        name="max-autotune",
        wheel="torch",
        prepare=_max_autotune,
        settings={**FROZEN, "mode": MAX_AUTOTUNE},
    ),
)
