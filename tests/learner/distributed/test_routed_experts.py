"""Recorded experts on their way into the sequences of a rank, and into a packed row."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.distributed.routed_experts import RecordedExperts, add_experts
from rollmesh.learner.distributed.train_plan import TrainPlan
from rollmesh.mesh.trajectory.routing import PROMPT_EXPERTS, ROUTED_EXPERTS
from rollmesh.protos import trajectory_pb2
from tests.learner.dataflow import make_groups, make_plan

_SHAPE = (2, 2)


class Kept:
    """Experts in memory, by group, member and name; counts what is asked for."""

    def __init__(self, arrays: Mapping[tuple[str, int, str], object]) -> None:
        self._arrays = arrays
        self.asked: list[tuple[str, int, str]] = []

    def get(self, wanted: Collection[RecordedExperts]) -> Mapping[RecordedExperts, object]:
        found = {}
        for each in wanted:
            name = trajectory_pb2.SideData.FromString(each.entry).name
            key = each.group_id, each.member, name
            self.asked.append(key)
            if key in self._arrays:
                found[each] = self._arrays[key]
        return found


def _planned(names: Mapping[int, tuple[str, ...]]) -> tuple[TrainPlan, dict[int, TrainSequence]]:
    """A plan of two groups, whose members have side data of these names, and its sequences."""
    groups = make_groups(groups=2, members=3)
    for group in groups:
        for meta in group.leased.members:
            for name in names.get(meta.member, ()):
                meta.side.append(trajectory_pb2.SideData(name=name))
    plan = TrainPlan.from_bytes(make_plan(groups).to_bytes())
    trajectories = [m.trajectory for group in groups for m in group.members if m.trajectory is not None]
    sequences = {
        index: TrainSequence(groups[member.prompt].prompt_ids, t.response_ids, t.response_mask, t.log_probs)
        for index, (member, t) in enumerate(zip(plan.members, trajectories, strict=True))
    }
    return plan, sequences


def test_members_share_the_experts_of_their_prompt_which_come_once() -> None:
    plan, sequences = _planned({0: (ROUTED_EXPERTS,), 1: (ROUTED_EXPERTS, PROMPT_EXPERTS), 2: (ROUTED_EXPERTS,)})
    arrays: dict[tuple[str, int, str], object] = {}
    for index, member in enumerate(plan.members):
        arrays[member.group_id, member.member, ROUTED_EXPERTS] = np.full(
            (len(sequences[index].response_ids) - 1, *_SHAPE), index, np.uint8
        )
        prompt = np.full((len(sequences[index].prompt_ids), *_SHAPE), 7, np.uint8)
        arrays[member.group_id, 1, PROMPT_EXPERTS] = prompt
    source = Kept(arrays)
    found = add_experts(sequences, plan, source)
    assert len(source.asked) == len(set(source.asked)) == len(plan.members) + len(plan.prompts)
    for index, sequence in found.items():
        assert sequence.response_experts is not None
        assert (sequence.response_experts == index).all()
        assert sequence.prompt_experts is not None
        assert sequence.prompt_experts.dtype == np.int16
    of_first = [found[i].prompt_experts for i, m in enumerate(plan.members) if m.prompt == plan.members[0].prompt]
    assert all(each is of_first[0] for each in of_first)


def test_what_is_missing_or_of_another_length_is_left_out() -> None:
    plan, sequences = _planned({0: (ROUTED_EXPERTS, PROMPT_EXPERTS)})
    wrong = {(plan.members[0].group_id, 0, ROUTED_EXPERTS): np.zeros((99, *_SHAPE), np.uint8)}
    for sequence in add_experts(sequences, plan, Kept(wrong)).values():
        assert sequence.response_experts is None
        assert sequence.prompt_experts is None


@settings(max_examples=40)
@given(
    prompts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 6), min_size=12, max_size=12),
    known=st.lists(st.booleans(), min_size=12, max_size=12),
    seed=st.integers(0, 99),
)
def test_a_packed_row_has_the_experts_of_each_token(
    prompts: list[int], lengths: list[int], known: list[bool], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    sequences = []
    for group, size in enumerate(prompts):
        prompt = rng.integers(0, 1000, size).astype(np.int32)
        for member in range(3):
            count = lengths[3 * group + member]
            ids = rng.integers(0, 1000, count).astype(np.int32)
            sequence = TrainSequence(prompt, ids, np.ones(count, np.uint8), np.zeros(count, np.float32))
            # The experts of a token are its id, so that both can be compared.
            if known[3 * group]:
                sequence = replace(sequence, prompt_experts=_as_experts(prompt))
            if known[3 * group + member]:
                sequence = replace(sequence, response_experts=_as_experts(ids[:-1]))
            sequences.append(sequence)
    row = pack(sequences).row
    if row.routed_experts is None:
        assert not any(known[: 3 * len(prompts)])
        return
    tokens = row.input_ids[0]
    assert row.routed_experts.shape == (len(tokens), *_SHAPE)
    experts = row.routed_experts[:, 0, 0].long()
    assert bool(((experts == tokens) | (experts == -1)).all())
    computed = sum(
        known[3 * group] * size + sum(known[3 * group + m] * (lengths[3 * group + m] - 1) for m in range(3))
        for group, size in enumerate(prompts)
    )
    assert int((experts >= 0).sum()) == computed


def _as_experts(ids: np.ndarray) -> np.ndarray:
    return np.broadcast_to(ids[:, None, None], (len(ids), *_SHAPE)).astype(np.int16)
