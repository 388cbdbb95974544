"""Models that are linear layers and little else."""

from importlib import import_module

from gemm_tuner.models.row import Built, Model

_ROWS = 128  # of DLRM, for each of a batch


def _dlrm(batch: int, *, is_small: bool) -> Built:
    torch, modules = import_module("torch"), import_module("gemm_tuner.models.modules")
    bottom, top = [13, 512, 256, 128], [479, 1024, 1024, 512, 256, 1]  # as in MLPerf
    if is_small:
        bottom, top = [13, 32], [47, 64, 1]
    rows = batch * (16 if is_small else _ROWS)
    return Built(
        module=modules.Towers(bottom, top),
        inputs={"dense": torch.randn(rows, bottom[0]), "features": torch.randn(rows, top[0])},
    )


def _mixer(batch: int, *, is_small: bool) -> Built:
    torch, modules = import_module("torch"), import_module("gemm_tuner.models.modules")
    tokens, channels, widths = (16, 32, (24, 64)) if is_small else (196, 768, (384, 3072))
    return Built(
        module=modules.MixerBlock(tokens, channels, widths),
        inputs={"x": torch.randn(batch, tokens, channels)},
    )


# fmt: off
ROWS = (
    Model(name="dlrm", text="both perceptrons of MLPerf's sizes, 128 rows for each of a batch",
          build=_dlrm),
    Model(name="mixer", text="one block of MLP-Mixer B/16, 196 tokens of 768", build=_mixer),
)
# fmt: on
