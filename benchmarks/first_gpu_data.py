"""The model and the prompts of `first_gpu.sh`: the sizes of Qwen2.5-0.5B, random weights, a token per character.

The vocabulary is as large as the model's, so that every response is a text, and rewards of a group differ.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from examples.demo.model import build_tokenizer

_ROWS = 256
_CONTEXT = 2048
# The first of the characters other than the letters of the prompts.
_FIRST = 0x10000
_SIZES = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
_TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
_LETTERS = "abcdefghij"


def write(out: Path, *, tiny: bool) -> None:
    """Writes `model/` and `train.jsonl`."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    sizes: dict[str, Any] = _TINY if tiny else _SIZES
    others = [chr(_FIRST + index) for index in range(sizes["vocab_size"] - 3 - len(_LETTERS))]
    tokenizer = build_tokenizer(_LETTERS + "".join(others))
    tokenizer.model_max_length = _CONTEXT
    config = Qwen2Config(
        **sizes,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    drawn = random.Random(0)
    with (out / "train.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(_ROWS):
            prompt = "".join(drawn.choices(_LETTERS, k=drawn.randint(8, 60)))
            truth = {"ground_truth": others[len(others) // 2]}
            file.write(json.dumps({"prompt": prompt, "data_source": "first_gpu", "reward_model": truth}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    write(options.out, tiny=options.tiny)
