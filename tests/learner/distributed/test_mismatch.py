"""The difference of learner and generators over responses of the trained version, the same however it is seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, Rollouts, TokenBatch
from rollmesh.learner.batching.pack import lay_out
from rollmesh.learner.batching.types import PackedBatch, PackedRow, TrainSequence
from rollmesh.learner.distributed import rank_batch
from rollmesh.learner.distributed.mismatch import (
    Mismatch,
    MismatchMeter,
    any_fresh_response,
    fresh_responses,
    mismatch_of,
)
from rollmesh.learner.distributed.rollout_batch import RolloutBatch
from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.learner.engines.registry import create_engine
from rollmesh.testing.engine_cases import make_spec, policy_loss
from tests.learner.dataflow import make_groups, make_plan

# Four responses: fresh, with a stale beginning, without a recorded token, and empty.
LENGTHS = [2, 3, 2, 0]
STALENESS = [0, 0, 1, 0, 0, 0, 0]
BEHAVIOUR = [-1.0, -2.0, -1.0, -1.0, -1.0, -0.5, math.nan]
CURRENT = [-1.5, -1.0, -9.0, -9.0, -9.0, -0.5, -3.0]
EXPECTED = Mismatch(3, 0.5 + 1.0, (math.exp(-0.5) - 0.5) + (math.e - 2.0))


def rollouts() -> Rollouts:
    return Rollouts(
        group_ids=torch.zeros(4, dtype=torch.int64),
        rewards=torch.zeros(4),
        lengths=torch.tensor(LENGTHS),
        behaviour_log_probs=torch.tensor(BEHAVIOUR),
        staleness=torch.tensor(STALENESS, dtype=torch.int32),
        truncated=torch.zeros(4, dtype=torch.bool),
    )


def tokens(first: int, last: int) -> TokenBatch:
    """A micro-batch of some of the sequences."""
    batch = rollouts()
    places = (batch.sequence_ids >= first) & (batch.sequence_ids < last)
    return TokenBatch(
        sequence_ids=batch.sequence_ids[places] - first,
        sequence_lengths=batch.lengths[first:last],
        behaviour_log_probs=batch.behaviour_log_probs[places],
        advantages=torch.zeros(int(places.sum())),
        staleness=batch.staleness[places],
        sequence_rewards=batch.rewards[first:last],
    )


def assert_is(found: Mismatch, expected: Mismatch) -> None:
    assert found.tokens == expected.tokens
    assert (found.absolute, found.k3) == pytest.approx((expected.absolute, expected.k3), rel=1e-6)


def test_only_responses_that_the_trained_version_sampled_are_compared() -> None:
    found = mismatch_of(torch.tensor(CURRENT), rollouts())
    assert_is(found, EXPECTED)
    assert found.metrics() == pytest.approx(
        {"mismatch/tokens": 3.0, "mismatch/log_prob_diff": 0.5, "mismatch/k3_kl": EXPECTED.k3 / 3}
    )


def test_a_batch_of_stale_tokens_has_their_number_alone() -> None:
    batch = rollouts()
    batch.staleness += 1
    assert mismatch_of(torch.tensor(CURRENT), batch).metrics() == {"mismatch/tokens": 0.0}


@pytest.mark.parametrize(("has_results", "ranks"), [(True, 2), (False, 2)])
def test_micro_batches_and_ranks_add_up(has_results: bool, ranks: int) -> None:
    """Processes without results of their own (stages of a pipeline, parts of a sequence) count nothing twice."""

    def over_ranks(values: Tensor) -> Tensor:
        return values * ranks

    layout = SimpleNamespace(has_results=has_results)
    world = SimpleNamespace(sum=over_ranks, max_int=int)
    engine = SimpleNamespace(device=torch.device("cpu"), layout=layout, world=world)
    meter = MismatchMeter(cast(Engine, engine))
    seen: list[Any] = []

    def loss(output: ModelOutput, batch: TokenBatch, counts: GlobalCounts) -> LossOutput:
        seen.append((output, batch, counts))
        return cast(LossOutput, "share")

    watched, counts = meter.watching(loss), GlobalCounts(7, 3)
    log_probs = torch.tensor(CURRENT, requires_grad=True)
    for first, last, places in ((0, 2, slice(0, 5)), (2, 4, slice(5, 7))):
        current = log_probs[places]
        output = ModelOutput(log_probs=current, entropy=torch.zeros_like(current))
        assert watched(output, tokens(first, last), counts) == "share"
    assert len(seen) == 2
    assert_is(meter.total(lambda: None), EXPECTED + EXPECTED if has_results else Mismatch())


def test_where_no_fresh_response_was_computed_one_micro_batch_is() -> None:
    computed: list[Any] = []

    def infer(batches: list[Any]) -> list[ModelOutput]:
        computed.extend(batches)
        current = torch.tensor(CURRENT)[:2]
        return [ModelOutput(log_probs=current, entropy=torch.zeros_like(current)) for _ in batches]

    world = SimpleNamespace(sum=lambda values: values, max_int=int)
    layout = SimpleNamespace(has_results=True)
    engine = SimpleNamespace(device=torch.device("cpu"), layout=layout, world=world, infer=infer)
    fresh = SimpleNamespace(tokens=tokens(0, 1))
    found = MismatchMeter(cast(Engine, engine)).total(lambda: cast(PackedBatch, fresh))
    assert computed == [fresh]
    assert_is(found, Mismatch(2, EXPECTED.absolute, EXPECTED.k3))
    assert MismatchMeter(cast(Engine, engine)).total(lambda: None) == Mismatch()
    assert computed == [fresh]


def test_fresh_are_responses_that_can_be_compared() -> None:
    assert fresh_responses(rollouts()).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("staleness", "expected"),
    [(STALENESS, True), ([1] * 7, False), ([0, 1, 1, 0, 0, 1, 1], False), ([1, 1, 1, 1, 1, 1, 0], False)],
    ids=["some", "none", "parts of responses alone", "a token without a recorded log-prob alone"],
)
def test_a_batch_without_a_fresh_response_is_known_at_once(staleness: list[int], expected: bool) -> None:
    batch = rollouts()
    batch.staleness = torch.tensor(staleness, dtype=torch.int32)
    assert any_fresh_response(batch) == expected


@pytest.mark.parametrize("fresh", [None, 7])
def test_a_batch_is_packed_again_for_a_fresh_response_alone(
    engine_models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch, fresh: int | None
) -> None:
    """And of its micro-batches the one with that response, where the loss has computed none."""
    groups = make_groups()
    plan = make_plan(groups, token_budget=30)
    found = [member.trajectory for group in groups for member in group.members if member.trajectory is not None]
    sequences = {
        index: TrainSequence(
            groups[member.prompt].prompt_ids,
            trajectory.response_ids,
            trajectory.response_mask,
            trajectory.log_probs,
            staleness=int(index != fresh),
        )
        for index, (member, trajectory) in enumerate(zip(plan.members, found, strict=True))
    }
    engine = create_engine(make_spec(engine_models["tied"]))
    kinds = {ACTOR: "language_model"}
    batch = RolloutBatch(plan, sequences, {ACTOR: engine}, kinds, lambda: None, token_budget=30, seed=0)
    batch.rollouts.advantages = torch.zeros(batch.rollouts.num_tokens)
    (step,) = batch.steps(ACTOR, skip_zero_advantage=True)
    laid_out: list[Sequence[TrainSequence]] = []

    def watched(chosen: Sequence[TrainSequence], *others: Any) -> PackedRow:
        laid_out.append(chosen)
        return lay_out(chosen, *others)

    monkeypatch.setattr(rank_batch, "lay_out", watched)
    batch.update(ACTOR, policy_loss, step)
    (micro_batches,) = plan.divisions[1].minibatches[0]
    assert len(micro_batches) > 2
    assert batch.mismatch is not None
    if fresh is None:
        assert (batch.mismatch.tokens, laid_out) == (0, [])
        return
    assert batch.mismatch.tokens == int(sequences[fresh].response_mask.sum())
    (chosen,) = laid_out
    assert sequences[fresh] in chosen
