"""A tiny Qwen3-architecture model with a tokenizer of single characters, saved as an ordinary Hugging Face folder.

`build_tokenizer` also makes tokenizers for chats: with tokens for roles and for frequent pieces, and a chat template.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

_PAD, _END, _UNKNOWN = "<pad>", "<end>", "<unk>"
_CHARACTERS = string.digits + string.ascii_letters + "+-*:=,. "
# Heads of 32: vLLM has no kernel for narrower ones on a CPU.
_HIDDEN, _LAYERS, _HEADS, _WIDTH, _CONTEXT = 64, 2, 4, 32, 128


def build_tokenizer(
    characters: str = _CHARACTERS, *, pieces: Sequence[str] = (), chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """One token per character.

    Args:
        characters: of the vocabulary.
        pieces: longer texts with a token of their own.
        chat_template: for chats; a turn ends with `<end>`.
    """
    vocabulary = {token: index for index, token in enumerate([_PAD, _END, _UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    built = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_PAD,
        eos_token=_END,
        unk_token=_UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=_CONTEXT,
    )
    built.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    built.chat_template = chat_template
    return built


def program_tokenizer() -> PreTrainedTokenizerFast:
    """For programs: what stands in all of them has tokens of its own."""
    return build_tokenizer(_CHARACTERS + "()", pieces=("print(", "int(", "input()"))


def write_model(folder: Path, seed: int, tokenizer: PreTrainedTokenizerFast | None = None) -> int:
    """Writes a freshly initialized model and its tokenizer; returns the number of parameters."""
    tokenizer = tokenizer or build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=_HIDDEN,
        intermediate_size=4 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS // 2,
        head_dim=_WIDTH,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
        # So few and so narrow layers learn faster from a wider start than the usual 0.02.
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
