"""The rows of one optimizer step as this rank's packed micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollmesh.learner.algorithms.types import GlobalCounts
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.plan import PlanItem, plan_batch
from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.data.examples import Example
from rollmesh.learner.engines.interface import Engine


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """A batch.

    Attributes:
        micro_batches: of this data-parallel rank.
        places: per micro-batch, the places of its sequences among all of the batch's.
        counts: over all ranks.
        tokens: of all sequences, prompts included, over all ranks.
        rows: trained ones.
        skipped: rows that were left out.
    """

    micro_batches: list[PackedBatch]
    places: list[tuple[int, ...]]
    counts: GlobalCounts
    tokens: int
    rows: int
    skipped: int


def build_batch(examples: Sequence[Example | None], engine: Engine, token_budget: int) -> StepBatch:
    """Plans and packs a batch; the same plan in every process. Sequences of an example are in one micro-batch.

    Args:
        examples: the whole batch; None for rows that are left out.
        engine: computes it.
        token_budget: tokens per micro-batch.
    """
    kept = [example for example in examples if example is not None]
    owners = [(owner, place) for owner, example in enumerate(kept) for place in range(len(example.sequences))]
    sequences = [kept[owner].sequences[place] for owner, place in owners]
    items = [
        PlanItem(owner, len(sequence.prompt_ids), len(sequence.response_ids))
        for (owner, _), sequence in zip(owners, sequences, strict=True)
    ]
    layout = engine.layout
    plan = plan_batch(
        items,
        token_budget=token_budget,
        ranks=layout.dp_size,
        packing=engine.packing,
        cost=engine.cost.sequence_flops,
        whole_groups=True,
    )
    own = [places for places in plan.minibatches[0][layout.dp_rank] if places]
    micro_batches = []
    for places in own:
        packed = pack(sequences, places, engine.device)
        for name in kept[0].values:
            values = [kept[owner].values[name][place] for owner, place in (owners[index] for index in places)]
            packed.tokens.sequence_extra[name] = to_device(np.array(values, dtype=np.float32), engine.device)
        micro_batches.append(packed)
    counts = GlobalCounts(sum(int(s.response_mask.sum()) for s in sequences), len(sequences))
    tokens = sum(len(sequence) for sequence in sequences)
    return StepBatch(micro_batches, own, counts, tokens, len(kept), len(examples) - len(kept))
