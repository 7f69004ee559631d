"""The plan of a batch: complete, and the same after the wire."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.learner.distributed.train_plan import TrainPlan, plan_training
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.mesh.trajectory.lineage import Lineage
from rollmesh.protos import buffer_pb2, trajectory_pb2

LINEAGE = Lineage(((1, 0), (2, 3)))


def sampled(index: int, lengths: list[int], scored: list[bool], baseline: float | None) -> SampledGroup:
    members = [
        trajectory_pb2.MemberMeta(
            member=m,
            outcome=trajectory_pb2.OUTCOME_SCORED if scored[m] else trajectory_pb2.OUTCOME_ERROR,
            prompt_tokens=3,
            response_tokens=length,
            reward=0.5 * m,
            components={"style": float(m)} if m % 2 else {"form": 1.0},
            finish_reason=trajectory_pb2.FINISH_REASON_LENGTH if m % 3 == 0 else trajectory_pb2.FINISH_REASON_STOP,
        )
        for m, length in enumerate(lengths)
    ]
    greedy = 0
    if baseline is not None:
        greedy = 1
        members.append(
            trajectory_pb2.MemberMeta(member=len(members), outcome=trajectory_pb2.OUTCOME_SCORED, reward=baseline)
        )
    prompt = np.arange(3, dtype="<i4")
    task = trajectory_pb2.PromptTask(
        prompt_ids=prompt.tobytes(),
        sampling=trajectory_pb2.SamplingParams(temperature=0.5),
        n=len(members),
        greedy=greedy,
    )
    leased = buffer_pb2.LeasedGroup(group_id=f"g{index}", task=task, members=members)
    return SampledGroup.of(leased, prompt)


member = st.tuples(st.integers(1, 40), st.booleans())


@settings(max_examples=50)
@given(
    groups=st.lists(st.lists(member, min_size=1, max_size=5), min_size=1, max_size=8),
    ranks=st.integers(1, 3),
    minibatches=st.integers(1, 3),
    greedy=st.booleans(),
)
def test_every_scored_member_is_trained_by_one_rank(
    groups: list[list[tuple[int, bool]]], ranks: int, minibatches: int, greedy: bool
) -> None:
    batch = [
        sampled(i, [length for length, _ in g], [scored for _, scored in g], float(i) if greedy else None)
        for i, g in enumerate(groups)
    ]
    plan = plan_training(batch, version=7, lineage=LINEAGE, token_budget=64, minibatches=minibatches, dp_sizes={ranks})
    again = TrainPlan.from_bytes(plan.to_bytes())
    assert again == plan
    expected = {(f"g{i}", m) for i, g in enumerate(groups) for m, (_, scored) in enumerate(g) if scored}
    dealt = [i for step in plan.divisions[ranks].minibatches for rank in step for micro in rank for i in micro]
    assert sorted(dealt) == list(range(len(plan.members)))
    assert {(m.group_id, m.member) for m in plan.members} == expected
    assert all(len(step) == ranks for step in plan.divisions[ranks].minibatches)
    assert {prompt.temperature for prompt in plan.prompts} == {0.5}
    assert plan.prompts[0].array().tolist() == [0, 1, 2]
    assert [p.baseline_reward for p in plan.prompts] == [float(i) if greedy else None for i in range(len(groups))]
    for planned in plan.members:
        assert planned.reward == 0.5 * planned.member
        assert planned.truncated == (planned.member % 3 == 0)
        components = dict(zip(plan.components, planned.components, strict=True))
        assert components.get("style", 0.0) == (planned.member if planned.member % 2 else 0.0)
