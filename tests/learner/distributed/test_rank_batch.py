"""A rank's part of a batch: each trained token is in a micro-batch, as often as repeated, with its values."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.learner.algorithms.types import Rollouts
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.distributed.rank_batch import RankBatch
from rollmesh.learner.engines.layout import Layout
from tests.learner.dataflow import make_groups, make_plan


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1 << 16),
    ranks=st.integers(1, 3),
    minibatches=st.integers(1, 3),
    budget=st.sampled_from([12, 30, 1 << 20]),
    silent=st.booleans(),
)
def test_shares_are_complete_and_views_point_at_them(
    seed: int, ranks: int, minibatches: int, budget: int, silent: bool
) -> None:
    rng = np.random.default_rng(seed)
    groups = make_groups(seed % 5, groups=5)
    plan = make_plan(groups, token_budget=budget, minibatches=minibatches, dp_sizes=(ranks,))
    found = [m.trajectory for group in groups for m in group.members if m.trajectory is not None]
    sequences = {
        index: TrainSequence(groups[member.prompt].prompt_ids, t.response_ids, t.response_mask, t.log_probs)
        for index, (member, t) in enumerate(zip(plan.members, found, strict=True))
    }
    lengths = np.array([int(t.response_mask.sum()) for t in found])
    total, count = int(lengths.sum()), len(lengths)
    owner = np.repeat(np.arange(count), lengths)
    keep, repeats = rng.random(total) < 0.7, rng.integers(0, 4, count)
    advantages = rng.normal(size=total) * (rng.random(count) < 0.6)[owner]
    rollouts = Rollouts(
        group_ids=torch.zeros(count, dtype=torch.int64),
        rewards=torch.arange(count, dtype=torch.float32),
        lengths=torch.from_numpy(lengths),
        behaviour_log_probs=torch.from_numpy(np.concatenate([t.log_probs[t.response_mask == 1] for t in found])),
        staleness=torch.zeros(total, dtype=torch.int32),
        truncated=torch.zeros(count, dtype=torch.bool),
        keep=torch.from_numpy(keep),
        repeats=torch.from_numpy(repeats),
        advantages=torch.from_numpy(advantages),
        extra={"place": torch.arange(total)},
    )
    trained = np.zeros(total, dtype=int)
    for minibatch in range(plan.minibatches):
        taken: list[int] = []
        sizes = set()
        for rank in range(ranks):
            rank_batch = RankBatch(
                plan, Layout.of_neighbours(rank, ranks), sequences, lengths, torch.device("cpu"), budget
            )
            step = rank_batch.steps(rollouts, skip_zero_advantage=silent)[minibatch]
            view = rank_batch.minibatch_view(minibatch, step, rollouts)
            sizes.add((step.counts.tokens, step.counts.sequences, view.token_indices.numel()))
            for micro, batch, own in zip(step.micro_batches, step.batches, view.positions, strict=True):
                places = batch.tokens.extra["place"]
                assert torch.equal(view.token_indices[own], places)
                assert torch.equal(batch.tokens.behaviour_log_probs, rollouts.behaviour_log_probs[places])
                in_batch = [micro.members[i] for i in batch.tokens.sequence_ids.tolist()]
                assert owner[places.numpy()].tolist() == in_batch
                assert batch.tokens.sequence_rewards.tolist() == [float(m) for m in micro.members]
                assert batch.num_tokens <= budget or len(set(micro.members)) == 1
                taken += own.tolist()
                np.add.at(trained, places.numpy(), 1)
        # All ranks agree on the counts; a copy of a token has a place of its own in the view.
        ((tokens, sequences_counted, seen),) = sizes
        assert tokens == seen
        assert len(set(taken)) == len(taken) <= seen
        members = np.sort([m for rank in plan.divisions[ranks].minibatches[minibatch] for micro in rank for m in micro])
        kept = np.bincount(owner[keep], minlength=count)
        assert tokens == (kept * repeats)[members].sum()
        assert sequences_counted == ((kept > 0) * repeats)[members].sum()
    loud = np.bincount(owner[keep & (advantages != 0)], minlength=count) > 0
    expected = keep * repeats[owner] * (loud[owner] if silent else 1)
    assert trained.tolist() == expected.tolist()
