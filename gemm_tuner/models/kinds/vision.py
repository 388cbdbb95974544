"""Models of pictures: a transformer, and a network of convolutions."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from gemm_tuner.models.row import Built, Model


def _build(
    family: str,
    sizes: Mapping[str, Any],
    small: Mapping[str, Any],
    batch: int,
    *,
    is_small: bool,
) -> Built:
    torch, transformers = import_module("torch"), import_module("transformers")
    config = getattr(transformers, f"{family}Config")(**(small if is_small else sizes))
    model = getattr(transformers, f"{family}Model")(config)
    # Convolutions by one element are products without a copy where the channels are last.
    last = {"memory_format": torch.channels_last}
    pixels = torch.randn(batch, 3, *([getattr(config, "image_size", 224)] * 2))
    return Built(
        module=import_module("gemm_tuner.models.modules").OfPixels(model).to(**last),
        inputs={"pixel_values": pixels.to(**last)},
    )


# fmt: off
_SMALL_VIT = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2,
              "intermediate_size": 128, "image_size": 32}
_SMALL_RESNET = {"image_size": 32, "embedding_size": 16, "hidden_sizes": [32, 64],
                 "depths": [1, 1]}

ROWS = (
    Model(name="vit-b16", text="12 layers of 768, 197 patches",
          build=partial(_build, "ViT", {}, _SMALL_VIT)),
    Model(name="resnet50", text="224 x 224 pixels, channels last",
          build=partial(_build, "ResNet", {}, _SMALL_RESNET)),
)
# fmt: on
