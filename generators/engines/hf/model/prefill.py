"""The forward pass over whole prompts (or, at a swap with recomputation, over whole running sequences).

Sequences are right-padded: under a causal mask padding changes nothing for what stands before it. A long one takes
several passes, each over the keys and values of those before it, so that memory grows with its length alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from rollmesh.generators.engines.hf.kv_cache import PrefixCache
from rollmesh.generators.engines.hf.model.attention_masks import MaskBuilder
from rollmesh.generators.engines.hf.model.expert_recorder import ExpertRecorder, Experts
from rollmesh.generators.engines.hf.model.vision import Vision

# Padded tokens of one forward pass, and those of one sequence in it; they bound its memory.
_MAX_TOKENS = 8192
CHUNK_TOKENS = 2048
# Tokens that every model takes.
HARMLESS = (1, 2, 3)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixBatch:
    """The outcome of one forward pass.

    Attributes:
        cache: keys and values of all its sequences, right-padded.
        logits: [sequences, vocabulary], of each sequence's last token.
        experts: [sequences, columns, layers, K], of each token; None: they are not recorded.
    """

    cache: PrefixCache
    logits: torch.Tensor
    experts: Experts | None = None


class Prefix(NamedTuple):
    """A sequence of a `PrefixBatch`."""

    batch: PrefixBatch
    member: int


class Prefiller:
    """Runs sequences through the model from their start.

    Args:
        model: in evaluation mode.
        layers: of the model.
        masks: of the model.
        vision: of a model that takes images.
        recorder: of its experts; None: they are not recorded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: int,
        masks: MaskBuilder,
        vision: Vision | None = None,
        recorder: ExpertRecorder | None = None,
    ) -> None:
        self._recorder = recorder
        self._model = model
        self._vision = vision
        self._layers = layers
        self._masks = masks
        self._device = model.device

    def run(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[bytes, ...]] | None = None
    ) -> list[Prefix]:
        """Prefixes of the given token sequences, in their order; `images` are those of each, None: they have none."""
        prefixes: dict[int, Prefix] = {}
        for members, batch in self.batches(sequences, images):
            prefixes.update((member, Prefix(batch, index)) for index, member in enumerate(members))
        return [prefixes[member] for member in range(len(sequences))]

    def batches(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[bytes, ...]] | None = None
    ) -> Iterator[tuple[list[int], PrefixBatch]]:
        """Yields each forward pass as it comes, with the indices of its sequences."""
        for members in _batches([len(ids) for ids in sequences]):
            member_images = None if images is None else [images[member] for member in members]
            yield members, self._forward([sequences[member] for member in members], member_images)

    def log_probs(self, ids: Sequence[int]) -> torch.Tensor:
        """Log-probs of each next token, float32 [len(ids) - 1], nats."""
        row = torch.tensor([ids], device=self._device)
        parts = []
        for begin, end, logits in self._passes({"input_ids": row}, len(ids), keep=0):
            following = row[0, begin + 1 : end + 1, None]
            every = torch.log_softmax(logits[0, : len(following)].float(), -1)
            parts.append(every.gather(1, following)[:, 0])
        return torch.cat(parts)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values, all layers together; runs a few tokens."""
        [prefix] = self.run([HARMLESS])
        return prefix.batch.cache.nbytes // len(HARMLESS)

    def _forward(self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[bytes, ...]] | None) -> PrefixBatch:
        columns = max(len(ids) for ids in sequences)
        input_ids = torch.tensor([[*ids, *([0] * (columns - len(ids)))] for ids in sequences], device=self._device)
        inputs = {"input_ids": input_ids}
        if self._vision is not None and images is not None and any(images):
            inputs = {"inputs_embeds": self._vision.embedded(input_ids, images)}
        cache = PrefixCache(self._layers, columns)
        last = torch.tensor([[len(ids) - 1] for ids in sequences], device=self._device)
        # Several sequences take one pass; the last token of a single one is in the last pass.
        keep: int | torch.Tensor = last if len(sequences) > 1 else 1
        recorded: list[Experts] = []
        with nullcontext() if self._recorder is None else self._recorder.recording():
            for begin, end, output in self._passes(inputs, columns, keep=keep, cache=cache):
                logits = output
                if self._recorder is not None:
                    experts = self._recorder.taken()
                    recorded.append(experts.reshape(len(sequences), end - begin, *experts.shape[1:]))
        return PrefixBatch(cache, logits[:, 0], np.concatenate(recorded, axis=1) if recorded else None)

    def _passes(
        self,
        inputs: Mapping[str, torch.Tensor],
        columns: int,
        *,
        keep: int | torch.Tensor,
        cache: PrefixCache | None = None,
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(first token, end, logits of the tokens in `keep`) of each pass; `inputs` are [sequences, columns, ...]."""
        cache = cache if cache is not None else PrefixCache(self._layers, columns)
        for begin in range(0, columns, CHUNK_TOKENS):
            end = min(begin + CHUNK_TOKENS, columns)
            output = self._model(
                **{name: tensor[:, begin:end] for name, tensor in inputs.items()},
                attention_mask=self._masks.prefill(begin, end),
                position_ids=torch.arange(begin, end, device=self._device)[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=keep,
            )
            yield begin, end, output.logits


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices in batches of similar length, each of at most `_MAX_TOKENS` padded tokens and in one pass (or of one)."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    batch: list[int] = []
    for index in order:
        if batch and ((len(batch) + 1) * lengths[index] > _MAX_TOKENS or lengths[index] > CHUNK_TOKENS):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
