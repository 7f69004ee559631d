"""The plan of a batch: complete, the same after the wire, and spread advantages."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.groups import SampledGroup
from learner.lineage import Lineage
from learner.plan import PlannedMember, TrainPlan, plan_training
from learner.weighing import WeighedGroup
from learner.worker import _spread
from protos import buffer_pb2, trajectory_pb2

LINEAGE = Lineage(((1, 0), (2, 3)))


def weighed(index: int, lengths: list[int], scored: list[bool]) -> WeighedGroup:
    members = [
        trajectory_pb2.MemberMeta(member=m, prompt_tokens=3, response_tokens=length) for m, length in enumerate(lengths)
    ]
    prompt = np.arange(3, dtype="<i4")
    task = trajectory_pb2.PromptTask(
        prompt_ids=prompt.tobytes(), sampling=trajectory_pb2.SamplingParams(temperature=0.5)
    )
    leased = buffer_pb2.LeasedGroup(group_id=f"g{index}", task=task, members=members)
    group = SampledGroup(leased, prompt, [None] * len(members), scored)
    return WeighedGroup(group, [torch.tensor(float(index)) for _ in members])


member = st.tuples(st.integers(1, 40), st.booleans())


@settings(max_examples=50, deadline=None)
@given(
    groups=st.lists(st.lists(member, min_size=1, max_size=5), min_size=1, max_size=8),
    ranks=st.integers(1, 3),
    minibatches=st.integers(1, 3),
)
def test_every_scored_member_is_trained_by_one_rank(
    groups: list[list[tuple[int, bool]]], ranks: int, minibatches: int
) -> None:
    batch = [weighed(i, [length for length, _ in g], [scored for _, scored in g]) for i, g in enumerate(groups)]
    plan = plan_training(batch, version=7, lineage=LINEAGE, token_budget=64, minibatches=minibatches, ranks=ranks)
    again = TrainPlan.from_bytes(plan.to_bytes())
    assert again == plan
    expected = {(f"g{i}", m) for i, g in enumerate(groups) for m, (_, scored) in enumerate(g) if scored}
    dealt = [i for step in plan.division.minibatches for rank in step for micro in rank for i in micro]
    assert sorted(dealt) == list(range(len(plan.members)))
    assert {(m.group_id, m.member) for m in plan.members} == expected
    assert all(len(step) == ranks for step in plan.division.minibatches)
    assert {prompt.temperature for prompt in plan.prompts} == {0.5}
    assert plan.prompts[0].array().tolist() == [0, 1, 2]


def test_advantages_go_to_the_tokens_that_are_trained() -> None:
    mask = np.array([1, 0, 1], dtype=np.uint8)
    one = PlannedMember(0, "g", 0, 3, np.array([0.5], dtype="<f4").tobytes())
    assert _spread(one, mask) == 0.5
    per_token = PlannedMember(0, "g", 0, 3, np.array([1.0, 2.0], dtype="<f4").tobytes())
    assert np.asarray(_spread(per_token, mask)).tolist() == [1.0, 0.0, 2.0]
