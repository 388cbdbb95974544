"""Decoders of text: whole passes over a text, and a step that reads one more token."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from gemm_tuner.models.row import Built, Model

_TOKENS, _FEW_TOKENS = 128, 16


def _model(
    family: str, sizes: Mapping[str, int], small: Mapping[str, int], *, is_small: bool
) -> tuple[Any, int]:
    """Return a model, and the number of tokens of a text."""
    transformers = import_module("transformers")
    config = getattr(transformers, f"{family}Config")(**(small if is_small else sizes))
    model = getattr(transformers, f"{family}Model")(config)
    return model, _FEW_TOKENS if is_small else _TOKENS


def _prefill(
    family: str, sizes: Mapping[str, int], small: Mapping[str, int], batch: int, *, is_small: bool
) -> Built:
    torch = import_module("torch")
    model, tokens = _model(family, sizes, small, is_small=is_small)
    return Built(
        module=import_module("gemm_tuner.models.modules").OfText(model),
        inputs={
            "input_ids": torch.randint(model.config.vocab_size, (batch, tokens)),
            "attention_mask": torch.ones(batch, tokens, dtype=torch.int64),
        },
    )


def _decode(
    family: str, sizes: Mapping[str, int], small: Mapping[str, int], batch: int, *, is_small: bool
) -> Built:
    torch = import_module("torch")
    model, tokens = _model(family, sizes, small, is_small=is_small)
    config = model.config
    before = (
        *(config.num_hidden_layers, batch),
        *(config.num_key_value_heads, tokens - 1, config.head_dim),
    )
    return Built(
        module=import_module("gemm_tuner.models.decoder_step").WithPast(model),
        inputs={
            "input_ids": torch.randint(config.vocab_size, (batch, 1)),
            "attention_mask": torch.ones(batch, tokens, dtype=torch.int64),
            "keys": torch.randn(before),
            "values": torch.randn(before),
        },
    )


# fmt: off
_SMALL_GPT2 = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 100}
_SMALL_OPT = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "ffn_dim": 128,
              "vocab_size": 100, "word_embed_proj_dim": 64}
# Two layers of the sizes of a Llama with 7e9 weights; its words would be most of the memory.
_LLAMA = {"num_hidden_layers": 2, "vocab_size": 1000}
_SMALL_LLAMA = {"num_hidden_layers": 2, "vocab_size": 100, "hidden_size": 64,
                "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128}

ROWS = (
    Model(name="gpt2", text="12 layers of 768, a text of 128 tokens",
          build=partial(_prefill, "GPT2", {}, _SMALL_GPT2)),
    Model(name="opt-125m", text="12 layers of 768, a text of 128 tokens",
          build=partial(_prefill, "OPT", {}, _SMALL_OPT)),
    Model(name="llama-prefill", text="2 layers of 4096, a text of 128 tokens",
          build=partial(_prefill, "Llama", _LLAMA, _SMALL_LLAMA)),
    Model(name="llama-decode", text="2 layers of 4096, one token after 127",
          build=partial(_decode, "Llama", _LLAMA, _SMALL_LLAMA)),
)
# fmt: on
