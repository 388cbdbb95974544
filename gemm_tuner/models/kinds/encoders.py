"""Encoders of text: BERT and the smaller ones that were made of it."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module

from gemm_tuner.models.row import Built, Model

_TOKENS, _FEW_TOKENS = 128, 16


def _build(
    family: str, sizes: Mapping[str, int], small: Mapping[str, int], batch: int, *, is_small: bool
) -> Built:
    torch, transformers = import_module("torch"), import_module("transformers")
    modules = import_module("gemm_tuner.models.modules")
    config = getattr(transformers, f"{family}Config")(**(small if is_small else sizes))
    model = getattr(transformers, f"{family}Model")(config)
    tokens = _FEW_TOKENS if is_small else _TOKENS
    return Built(
        module=modules.OfTokens(model),
        inputs={"input_ids": torch.randint(config.vocab_size, (batch, tokens))},
    )


# fmt: off
_SMALL = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2,
          "intermediate_size": 128, "vocab_size": 100}
_SMALL_DISTILLED = {"n_layers": 1, "dim": 64, "n_heads": 2, "hidden_dim": 128, "vocab_size": 100}
_SMALL_MOBILE = {"num_hidden_layers": 1, "vocab_size": 100}
_LARGE = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16,
          "intermediate_size": 4096}

ROWS = (
    Model(name="bert-base", text="12 layers of 768, 128 tokens",
          build=partial(_build, "Bert", {}, _SMALL)),
    Model(name="bert-large", text="24 layers of 1024, 128 tokens",
          build=partial(_build, "Bert", _LARGE, _SMALL)),
    Model(name="distilbert", text="6 layers of 768, 128 tokens",
          build=partial(_build, "DistilBert", {}, _SMALL_DISTILLED)),
    Model(name="mobilebert", text="24 layers of 512 with bottlenecks of 128, 128 tokens",
          build=partial(_build, "MobileBert", {}, _SMALL_MOBILE)),
)
# fmt: on
