"""The folder of a whole model, as small as one can be, written without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

_WIDTH = 8
_LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_SIZES = {
    "model_type": "llama",
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": _WIDTH,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def write_tiny_folder(folder: Path, **changes: object) -> Path:
    """Writes a llama of one layer, whose weights are zero, and a tokenizer of two words.

    Args:
        folder: to make.
        changes: of its configuration, but for its sizes.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_SIZES | changes))
    vocabulary = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": vocabulary}))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    matrices = ["embed_tokens", *(f"layers.0.{name}" for name in (*_LINEAR, *_GATED))]
    norms = ["norm", *(f"layers.0.{name}" for name in _NORMS)]
    weights = {f"model.{name}.weight": np.zeros((_WIDTH, _WIDTH), np.float32) for name in matrices}
    weights |= {f"model.{name}.weight": np.zeros(_WIDTH, np.float32) for name in norms}
    save_file(weights, folder / "model.safetensors")
    return folder
