"""torch.compile by Inductor, with frozen weights."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from gemm_tuner.models.row import Built, Prepared, Way, Work, tensors_of

MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
CPP_WRAPPER = {"options": {"cpp_wrapper": True}}


def prepare_compiled(options: Mapping[str, object], work: Work) -> Prepared:
    """Return a model under torch.compile with some options, its weights frozen."""
    torch = import_module("torch")
    inductor: Any = import_module("torch._inductor.config")
    inductor.freezing = True
    built = work.converted()
    compiled = Built(module=torch.compile(built.module, **options), inputs=built.inputs)
    return Prepared(call=compiled.call, outputs=tensors_of, plain=built)


ROWS = (
    Way(
        name="compile",
        wheel="torch",
        prepare=partial(prepare_compiled, {}),
        settings={"freezing": "on"},
    ),
    Way(
        name="cpp-wrapper",
        wheel="torch",
        prepare=partial(prepare_compiled, CPP_WRAPPER),
        settings={"freezing": "on", "cpp_wrapper": "on"},
    ),
    Way(
        name="max-autotune",
        wheel="torch",
        prepare=partial(prepare_compiled, {"mode": MAX_AUTOTUNE}),
        settings={"freezing": "on", "mode": MAX_AUTOTUNE},
    ),
)
