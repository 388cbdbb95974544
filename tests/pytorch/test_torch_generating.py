"""Text that language models generate; skipped where PyTorch or transformers is not installed."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

gt: Any = pytest.importorskip("gemm_tuner.torch")

from torch_kernels import Kernels  # noqa: E402 - after PyTorch was found

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch" / "generate.py"
SMALL = ("--layers", "1", "--width", "64", "--prompt", "4", "--tokens", "2", "--rounds", "1")


def _text(model: Any, prompt: Any) -> list[int]:  # noqa: ANN401 - a model, and tensors
    with torch.no_grad():
        found = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
        )
    numbers: list[int] = found[0].tolist()
    return numbers


def test_a_model_generates_the_same_text_for_prompts_of_any_length() -> None:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    plain = transformers.LlamaForCausalLM(config).eval()
    tuned = copy.deepcopy(plain)

    report = gt.replace(tuned, rows=[1, "2..16"], source=Kernels())

    assert len(report.taken) == 15  # seven in each layer, and the words
    prompts = [torch.randint(50, (1, length)) for length in (1, 3, 13)]
    texts = [_text(plain, prompt) for prompt in prompts]
    assert [_text(tuned, prompt) for prompt in prompts] == texts
    gt.free_weights(tuned)
    assert [_text(tuned, prompt) for prompt in prompts] == texts


def test_gpt2_generates_the_same_text() -> None:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=50, eos_token_id=None, bos_token_id=0
    )
    plain = transformers.GPT2LMHeadModel(config).eval()
    tuned = copy.deepcopy(plain)

    report = gt.replace(tuned, rows=[1, "2..16"], source=Kernels())

    assert len(report.taken) == 9  # four in each layer, and the words
    prompts = [torch.randint(50, (1, length)) for length in (1, 13)]
    texts = [_text(plain, prompt) for prompt in prompts]
    assert [_text(tuned, prompt) for prompt in prompts] == texts


@pytest.mark.parametrize(
    "wrong", [("--tokens", "0"), ("--rounds", "-3"), ("--width", "65"), ("--layers", "x")]
)
def test_the_example_refuses_what_it_cannot_do(wrong: tuple[str, str]) -> None:
    told = subprocess.run(
        [sys.executable, EXAMPLE, *wrong], capture_output=True, text=True, timeout=60, check=False
    )

    assert told.returncode == 2
    assert f"argument {wrong[0]}" in told.stderr


def test_the_example_generates_and_says_how_fast(data_directory: Path) -> None:
    told = subprocess.run(
        [sys.executable, EXAMPLE, *SMALL, "--tune", "never"],
        env={**os.environ, "XDG_DATA_HOME": str(data_directory)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert told.returncode == 0, told.stderr
    layers, prompt, token = told.stdout.splitlines()
    assert layers == "0 of 8 layers call tuned kernels"
    assert prompt.startswith("prompt of 4 tokens: ")
    assert token.endswith(" times the speed")
