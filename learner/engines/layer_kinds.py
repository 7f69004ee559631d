"""Kinds of layers as transformers' configurations name them: one table for packing, model FLOPs and planned memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Properties of a kind of layer.

    Attributes:
        attends: each token has keys and values, and sees those of others.
        windowed: a token sees those of a window alone.
        packing: `packed`: sequences lie side by side. `recurrent`: the same, but for a part that carries a state from
            token to token. `rows`: each gets a row, where short and long ones are treated alike. None: not trained.
    """

    attends: bool = True
    windowed: bool = False
    packing: Literal["packed", "recurrent", "rows"] | None = None


_KINDS = {
    "full_attention": LayerKind(packing="packed"),
    "sliding_attention": LayerKind(windowed=True, packing="packed"),
    "chunked_attention": LayerKind(windowed=True, packing="rows"),
    # Attention next to a state space or a convolution.
    "hybrid": LayerKind(packing="recurrent"),
    "hybrid_sliding": LayerKind(windowed=True, packing="recurrent"),
    # A state alone.
    "linear_attention": LayerKind(attends=False, packing="recurrent"),
    "conv": LayerKind(attends=False, packing="recurrent"),
    # A feed-forward part that counts as a layer.
    "moe": LayerKind(attends=False, packing="packed"),
    "mlp": LayerKind(attends=False, packing="packed"),
}


def layer_kinds(config: Any) -> list[str]:
    """The kind of every layer; where a configuration names none, that of its attention for all.

    Args:
        config: of a Hugging Face model.
    """
    text = config.get_text_config()
    named = getattr(text, "layer_types", None)
    if named is not None:
        return list(named)
    return ["sliding_attention" if window_of(text) else "full_attention"] * getattr(text, "num_hidden_layers", 0)


def properties_of(kind: str) -> LayerKind:
    """The properties of a kind; one that is not known is taken to attend, and not trained."""
    return _KINDS.get(kind, LayerKind())


def window_of(text: Any) -> int | None:
    """Number of keys that a token sees in a windowed layer.

    Args:
        text: configuration of a Hugging Face model's text part.
    """
    return getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
