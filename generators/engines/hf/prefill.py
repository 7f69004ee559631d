"""The forward pass over whole prompts (or, at a swap with recomputation, over whole running sequences).

Sequences are right-padded: under a causal mask padding changes nothing for what stands before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from generators.engines.hf.cache import PrefixCache
from generators.engines.hf.masks import MaskBuilder
from generators.engines.hf.vision import Vision

# Padded tokens of one forward pass; bounds its memory.
_MAX_TOKENS = 8192


@dataclass(frozen=True, slots=True, eq=False)
class PrefixBatch:
    """The outcome of one forward pass.

    Attributes:
        cache: keys and values of all its sequences, right-padded.
        logits: [sequences, vocabulary], of each sequence's last token.
    """

    cache: PrefixCache
    logits: torch.Tensor


class Prefix(NamedTuple):
    """One sequence of a `PrefixBatch`."""

    batch: PrefixBatch
    member: int


class Prefiller:
    """Runs sequences through the model from their start.

    Args:
        model: in evaluation mode.
        layers: of the model.
        masks: of the model.
        vision: of a model that takes images.
    """

    def __init__(self, model: PreTrainedModel, layers: int, masks: MaskBuilder, vision: Vision | None = None) -> None:
        self._model = model
        self._vision = vision
        self._layers = layers
        self._masks = masks
        self._device = model.device

    def run(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[bytes, ...]] | None = None
    ) -> list[Prefix]:
        """Prefixes of the given token sequences, in their order; `images` are those of each, None: they have none."""
        prefixes: list[Prefix | None] = [None] * len(sequences)
        for members in _batches([len(ids) for ids in sequences]):
            given = None if images is None else [images[member] for member in members]
            batch = self._forward([sequences[member] for member in members], given)
            for index, member in enumerate(members):
                prefixes[member] = Prefix(batch, index)
        return [prefix for prefix in prefixes if prefix is not None]

    def log_probs(self, ids: Sequence[int]) -> torch.Tensor:
        """Float32 [len(ids) - 1], nats: of each next token."""
        row = torch.tensor([ids], device=self._device)
        logits = self._model(
            input_ids=row,
            attention_mask=self._masks.prefill(len(ids)),
            position_ids=torch.arange(len(ids), device=self._device)[None],
            past_key_values=PrefixCache(self._layers),
            use_cache=True,
        ).logits[0, :-1]
        return torch.log_softmax(logits.float(), -1).gather(1, row[0, 1:, None])[:, 0]

    def _forward(self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[bytes, ...]] | None) -> PrefixBatch:
        columns = max(len(ids) for ids in sequences)
        input_ids = torch.tensor([[*ids, *([0] * (columns - len(ids)))] for ids in sequences], device=self._device)
        last = torch.tensor([[len(ids) - 1] for ids in sequences], device=self._device)
        cache = PrefixCache(self._layers)
        inputs = {"input_ids": input_ids}
        if self._vision is not None and images is not None and any(images):
            inputs = {"inputs_embeds": self._vision.embedded(input_ids, images)}
        output = self._model(
            **inputs,
            attention_mask=self._masks.prefill(columns),
            position_ids=torch.arange(columns, device=self._device)[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=last,
        )
        return PrefixBatch(cache, output.logits[:, 0])


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices in batches of similar length, each of at most `_MAX_TOKENS` padded tokens (or one sequence)."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * lengths[index] > _MAX_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
