"""Model FLOPs: the arithmetic that a model needs for a micro-batch, whatever an engine computes twice.

PaLM (arXiv:2204.02311, appendix B) and Megatron-LM (arXiv:2104.04473, appendix) count them in this way. A forward pass
takes two operations per weight and token, and two per dimension of each score and weighted sum of attention. The
backward pass takes twice as much. Activations that are computed again do not count. Unlike there, attention counts the
keys that a token really sees: those before it in its sequence, and within its layer's window. Embeddings are looked up
and cost nothing. Experts count in the share of them that a token visits. Linear attention and state-space layers count
their weights alone, since their state costs little next to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.learner.batching.types import PackedRow, Segments
from rollmesh.learner.engines.layer_kinds import layer_kinds, properties_of, window_of

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Names, over the architectures of transformers, of the number of a layer's experts."""
# The same, of those that a token visits.
_VISITED = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k")
_OF_EXPERTS = re.compile(r"\.experts\.")
_HEADS = re.compile(r"(^|\.)(lm_head|score|embed_out|output_layer)\.weight$")


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The cost of a model's forward pass.

    Attributes:
        weights: weights that multiply a token, without the output layer's.
        head: weights of the output layer, which multiply predictors of trained tokens alone.
        pair: operations per layer for a token and a key that it sees.
        windows: per layer with attention, the number of keys that a token sees at most; None: all before it.
        stateful: weights, among those, of layers that compute a shared prompt again for each of its responses.
    """

    weights: int
    head: int
    pair: int
    windows: tuple[int | None, ...]
    stateful: int = 0

    def forward_flops(self, row: PackedRow) -> float:
        """Operations of one forward pass over a micro-batch."""
        tokens, predictors = row.input_ids.shape[1], len(row.labels)
        seen = {window: attended_pairs(row.segments, window) for window in set(self.windows)}
        attention = self.pair * sum(seen[window] for window in self.windows)
        return 2.0 * (self.weights * tokens + self.head * predictors) + attention

    def sequence_flops(
        self, tokens: NDArray[np.int64], context: NDArray[np.int64], again: NDArray[np.int64] | int = 0
    ) -> NDArray[np.float64]:
        """Operations of a forward pass without the output layer, as the plan of a batch compares sequences.

        Args:
            tokens: int64 [S], tokens computed.
            context: int64 [S], tokens before them that are computed elsewhere, as a shared prompt.
            again: int64 [S], tokens that layers with a state alone compute, in addition.

        Returns:
            float64 [S].
        """
        seen = {window: _pairs(tokens, context, window) for window in set(self.windows)}
        attention = self.pair * sum(seen[window].astype(np.float64) for window in self.windows)
        return np.asarray(2.0 * (self.weights * tokens + self.stateful * again) + attention)


def cost_of(
    config: Any, shapes: Iterable[tuple[str, tuple[int, ...]]], *, tied: bool, stateful: Iterable[str] = ()
) -> ModelCost:
    """The cost of a Hugging Face model.

    Args:
        config: its (text) configuration.
        shapes: names and whole shapes of its parameters, tied ones once.
        tied: the output layer's weight is the embedding.
        stateful: names of the layers that compute a shared prompt again for each of its responses.
    """
    wide = {name: shape for name, shape in shapes if len(shape) >= 2}
    embeddings = {name: int(np.prod(shape)) for name, shape in wide.items() if "embed" in name or ".wte" in name}
    embeddings |= {name: int(np.prod(shape)) for name, shape in wide.items() if name.endswith("wpe.weight")}
    heads = {name: int(np.prod(shape)) for name, shape in wide.items() if _HEADS.search(name)}
    share = _share_of_experts(config)
    used = {
        name: int(np.prod(shape)) * (share if _OF_EXPERTS.search(name) else 1.0)
        for name, shape in wide.items()
        if name not in heads and name not in embeddings
    }
    layers = tuple(f"{layer}." for layer in stateful)
    again = sum(weights for name, weights in used.items() if name.startswith(layers))
    head = max(embeddings.values(), default=0) if tied else sum(heads.values())
    return ModelCost(round(sum(used.values())), head, _pair_cost(config), _windows(config), round(again))


def attended_pairs(segments: Segments, window: int | None) -> int:
    """Pairs of a token and a key that it sees, over all sequences of a micro-batch.

    A token sees itself and those before it, `window` at most.
    """
    return int(_pairs(segments.lengths, segments.prefix_lengths, window).sum())


def _pairs(lengths: NDArray[np.int64], before: NDArray[np.int64], window: int | None) -> NDArray[np.int64]:
    if window is None:
        return before * lengths + lengths * (lengths + 1) // 2
    # Tokens that see the window in full: those at a position, from 1, beyond it.
    full = np.clip(before + lengths - np.maximum(before, window), 0, None)
    partial = lengths - full
    pairs: NDArray[np.int64] = partial * before + partial * (partial + 1) // 2 + full * window
    return pairs


def _share_of_experts(config: Any) -> float:
    experts, visited = (_first(config, names) for names in (EXPERTS, _VISITED))
    return visited / experts if experts and visited else 1.0


def _pair_cost(config: Any) -> int:
    """Operations for the score of a pair, and for adding its value: two per dimension each."""
    heads = getattr(config, "num_attention_heads", None) or 0
    if not heads:
        return 0
    keys = values = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "kv_lora_rank", None):
        keys = config.qk_nope_head_dim + config.qk_rope_head_dim
        values = config.v_head_dim
    return 2 * heads * (keys + values)


def _windows(config: Any) -> tuple[int | None, ...]:
    window = window_of(config)
    kinds = [properties_of(kind) for kind in layer_kinds(config)]
    return tuple(window if kind.windowed else None for kind in kinds if kind.attends)


def _first(config: Any, names: Iterable[str]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
