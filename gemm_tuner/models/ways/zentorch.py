"""AMD's kernels for PyTorch: its backend of torch.compile, with frozen weights."""

from importlib import import_module

from gemm_tuner.models.row import Prepared, Way, Work
from gemm_tuner.models.ways.compiled import FROZEN, prepare_compiled


def _prepare(work: Work) -> Prepared:
    import_module("zentorch")  # it is a backend from now on
    return prepare_compiled({}, work, backend="zentorch")


ROWS = (
    Way(
        name="zentorch",
        wheel="zentorch",
        prepare=_prepare,
        install='pip install "gemm-tuner[torch,zentorch]"',
        settings={**FROZEN, "backend": "zentorch"},  # without, it changes weights in place
    ),
)
