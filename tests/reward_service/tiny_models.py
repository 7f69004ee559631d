"""Tiny models that judge, with random weights, written into folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, Qwen3Config

from examples.demo.model import build_tokenizer

CONTEXT = 24
# Borders of steps, which the vocabulary has not.
PIECES = ("\n\n", "<step>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}={% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def write_model(
    folder: Path,
    kind: Any = AutoModelForSequenceClassification,
    *,
    labels: int = 1,
    padding: str | None = "<pad>",
    chat_template: str | None = None,
    head_dim: int = 8,
) -> Path:
    """Writes a model of one of transformers' classes, with the demonstration's tokenizer."""
    tokenizer = build_tokenizer(pieces=PIECES, chat_template=chat_template)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=2 * head_dim,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        num_labels=labels,
        pad_token_id=None if padding is None else tokenizer.convert_tokens_to_ids(padding),
        initializer_range=1.0,
    )
    torch.manual_seed(0)
    kind.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
