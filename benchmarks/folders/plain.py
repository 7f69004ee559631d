"""A whole tiny model folder, and changes of its files: configuration, tokenizer and stored tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT = "model.layers.0.self_attn.q_proj.weight"
_TEXTS = ["the cat sat on the mat and said hello world, what is two plus two? four, says Paris 0 1 2 3 4 5"] * 20
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def write_plain(folder: Path, kind: str = "qwen3", **changes: object) -> Path:
    """Writes a whole tiny model with its tokenizer.

    Args:
        folder: to write.
        kind: of the model, as transformers names it.
        changes: of its configuration.
    """
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    vocabulary: dict[str, Any] = {"vocab_size": len(tokenizer)} | ids
    settings = SIZES | vocabulary | changes
    if "text_config" in changes:
        settings = dict(changes) | {"text_config": {**changes["text_config"], **vocabulary}}  # type: ignore[dict-item]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        factory: Any = AutoModelForImageTextToText if "vision_config" in changes else AutoModelForCausalLM
        factory.from_config(AutoConfig.for_model(kind, **settings)).save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    splits = pre_tokenizers.Split(Regex(r"\p{N}|\s?\p{L}+|[^\s\p{L}\p{N}]+|\s+"), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        _TEXTS,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def edit(folder: Path, file: str = "config.json", drop: Sequence[str] = (), **values: object) -> None:
    """Changes keys of a JSON file."""
    path = folder / file
    before = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({k: v for k, v in before.items() if k not in drop} | values), encoding="utf-8")


def store(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the stored tensors, in place."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, {"format": "pt"})
