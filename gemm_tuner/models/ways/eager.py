"""PyTorch as it is."""

from gemm_tuner.models.row import Prepared, Way, Work, tensors_of


def _prepare(work: Work) -> Prepared:
    built = work.built
    return Prepared(call=built.call, outputs=tensors_of, plain=built)


ROWS = (Way(name="eager", wheel="torch", prepare=_prepare),)
