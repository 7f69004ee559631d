"""The order in which groups train, and groups that train more than once: over real gRPC and a real Redis."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.buffer.policy.draw_weights import WEIGHT_UNIT, weight_of
from rollmesh.buffer.reference_model.group_order import draw_key
from rollmesh.mesh.errors import ConfigError, DataError, PayloadError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from tests.buffer.mesh_fixture import Learner, Mesh, make_config, make_write, refs
from tests.buffer.test_flow import balanced

V0 = PolicyVersion(1, 0)
V1 = PolicyVersion(1, 1)


async def ready(mesh: Mesh, count: int, *, rewards: list[float] | None = None, **buffer: object) -> Learner:
    """A learner, and groups 1 .. count sealed in their order; B = 2."""
    front = await mesh.front(buffer={"max_staleness": 8, **buffer})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, count)
    admission, writer = generator.admission(), generator.writer()
    admission.update(count, V0)
    for number, grant in enumerate(await generator.grants(admission, count)):
        reward = rewards[number] if rewards else 1.0
        await writer.write([make_write(grant, member, [V0] * 3, reward=reward) for member in range(2)])
    return learner


async def test_freshest_trains_the_newest_tokens_first(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"max_staleness": 8, "order": "freshest"})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 3)
    admission, writer = generator.admission(), generator.writer()
    admission.update(3, V0)
    old, new, mixed = await generator.grants(admission, 3)
    await learner.client.set_policy_version(learner.incarnation, 1)
    await generator.finish(writer, [old], V0)
    await writer.write([make_write(mixed, m, [V0, V1]) for m in range(2)])
    await generator.finish(writer, [new], V1)
    groups = await learner.batch(learner.sampler(), 2, 1)
    assert [g.group_id for g in groups] == [new.group_id, old.group_id]


async def test_a_score_by_import_path_ranks_the_groups(mesh: Mesh, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def hardest(group):\n    return -sum(group.rewards) if len(group.rewards) == 2 else 100\n")
    learner = await ready(mesh, 4, rewards=[0.9, 0.1, 0.5, 0.2], order=f"{file}:hardest")
    sampler = learner.sampler()
    groups = await learner.batch(sampler, 2, 0)
    assert [g.task.ordinal for g in groups] == [2, 4]
    assert (await learner.train(groups, 0)).claimed
    assert [g.task.ordinal for g in await learner.batch(sampler, 2, 1)] == [3, 1]


async def test_a_score_that_fails_ends_the_sampling_with_its_words(mesh: Mesh, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def score(group):\n    return group.no_such_field\n")
    learner = await ready(mesh, 2, order=f"{file}:score")
    sampler = learner.sampler()
    with pytest.raises(DataError, match="no_such_field"):
        await learner.batch(sampler, 2, 0)
    assert (await balanced(learner)).ready == 2


async def test_an_order_that_cannot_be_loaded_is_refused_at_the_start(mesh: Mesh) -> None:
    with pytest.raises(ConfigError, match=r"no file /nowhere\.py"):
        await mesh.front(buffer={"order": "/nowhere.py:f"})


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        ({"order": "newest"}, "expected one of in_order, fifo, freshest, priority"),
        ({"max_reuse": 3, "max_staleness": 1}, "exceeds max_staleness"),
        ({"samples_per_insert": 2}, "goes with max_reuse"),
        ({"max_reuse": 2, "samples_per_insert": 3, "max_staleness": 4}, "at most that"),
        ({"priority": "loud"}, "expected uniform, reward_std"),
    ],
)
def test_settings_of_order_and_reuse_that_contradict_are_refused(
    tmp_path: Path, buffer: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config(tmp_path, buffer=buffer)


async def test_groups_are_used_up_to_the_limit_once_per_version_and_end_trained(mesh: Mesh) -> None:
    learner = await ready(mesh, 2, max_reuse=3)
    sampler = learner.sampler()
    leases = set()
    for version in range(3):
        groups = await learner.batch(sampler, 2, version)
        assert [g.use for g in groups] == [version + 1] * 2
        assert all(learner.payloads[g.group_id][0] for g in groups)
        leases |= {g.lease_id for g in groups}
        assert (await learner.train(groups, version)).claimed
        assert (await learner.client.claim("train", 1, version, refs(groups))).claimed, "a repeated claim succeeds"
    counts = await balanced(learner)
    assert (counts.consumed, counts.ready, counts.uses) == (2, 0, 6)
    assert len(leases) == 6, "each use has a lease of its own"
    assert (await learner.client.commit("train", 1, 2)).trained == 0, "the last use is not durable yet"
    assert (await learner.client.commit("train", 1, 3)).trained == 2


async def test_an_old_lease_cannot_claim_the_next_use(mesh: Mesh) -> None:
    learner = await ready(mesh, 2, max_reuse=3)
    groups = await learner.batch(learner.sampler(), 2, 0)
    await learner.train(groups, 0)
    response = await learner.client.claim("train", 1, 1, refs(groups))
    assert not response.claimed
    assert {r.reason for r in response.refused} == {"claimed_at_0"}
    assert (await balanced(learner)).uses == 2


async def test_a_resume_undoes_the_uses_behind_it_and_keeps_those_before(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"max_staleness": 8, "max_reuse": 2})
    first, generator = await mesh.learner(front), await mesh.generator(front)
    await first.seed(1, 4)
    admission, writer = generator.admission(), generator.writer()
    admission.update(4, V0)
    await generator.finish(writer, await generator.grants(admission, 4), V0)
    sampler = first.sampler()
    used: list[list[str]] = []
    for version in range(3):
        groups = await first.batch(sampler, 2, version)
        used.append(sorted(g.group_id for g in groups))
        await first.train(groups, version)
    assert used[0] == used[1] != used[2], "in order: both uses of the first two, then the others"
    await first.kill()
    second = await mesh.learner(front, resume_version=1, takeover=True)
    assert (await balanced(second)).uses == 2
    groups = await second.batch(second.sampler(), 2, 1)
    assert sorted(g.group_id for g in groups) == used[0]
    assert {g.use for g in groups} == {2}
    await second.train(groups, 1)
    assert (await second.client.commit("train", 2, 2)).trained == 2


async def test_the_gate_counts_the_uses_that_are_still_to_come(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"max_staleness": 3, "max_reuse": 2})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 9)
    admission, writer = generator.admission(), generator.writer()
    admission.update(9, V0)
    # B = 2, S = 3: 8 uses fit before the bound, which is 4 groups of 2 uses instead of 8 of one.
    grants = await generator.grants(admission, 4)
    description = await learner.client.describe("train")
    assert (description.counts.generating, description.counts.pending) == (4, 5)
    await generator.finish(writer, grants, V0)
    sampler = learner.sampler()
    for version in range(4):
        groups = await learner.batch(sampler, 2, version)
        assert (await learner.train(groups, version)).claimed
    assert (await learner.client.commit("train", 1, 4)).trained == 4


async def test_what_was_used_ends_as_trained_even_where_its_time_is_over(mesh: Mesh) -> None:
    learner = await ready(mesh, 2, max_reuse=3, max_staleness=2)
    sampler = learner.sampler()
    groups = await learner.batch(sampler, 2, 0)
    await learner.train(groups, 0)
    again = await learner.batch(sampler, 2, 1)
    lease = [pb.LeaseRef(group_id=again[0].group_id, lease_id=again[0].lease_id)]
    await learner.client.nack("train", 1, lease, pb.NACK_DISPOSITION_FILTER, "bored")
    counts = await balanced(learner)
    assert (counts.consumed, counts.leased, counts.filtered) == (1, 1, 0)
    await learner.client.nack("train", 1, refs(again[1:]), pb.NACK_DISPOSITION_RELEASE)
    await learner.client.set_policy_version(1, 5)
    # The front evicts what is over the bound; what was used waits for its commit instead.
    assert (await learner.client.commit("train", 1, 6)).trained >= 1
    counts = await balanced(learner)
    while counts.trained < 2:
        await learner.client.commit("train", 1, 6)
        counts = await balanced(learner)
    assert (counts.evicted_stale, counts.filtered) == (0, 0)


async def test_priorities_change_the_odds_and_the_odds_are_told(mesh: Mesh) -> None:
    learner = await ready(mesh, 4, order="priority", max_reuse=2)
    groups = await learner.batch(learner.sampler(), 2, 0)
    assert sorted(g.probability for g in groups) == pytest.approx([1 / 4, 1 / 3])
    assert {g.priority for g in groups} == {1.0}
    await learner.client.nack("train", 1, refs(groups), pb.NACK_DISPOSITION_RELEASE)
    heavy = groups[0].group_id
    assert (await learner.client.set_priorities("train", 1, {heavy: 1e6, "train-999": 2.0})).changed == 1
    again = await learner.batch(learner.sampler(), 1, 0)
    assert again[0].group_id == heavy
    assert (again[0].priority, again[0].probability) == (1e6, pytest.approx(1.0, abs=1e-4))
    with pytest.raises(PayloadError, match="positive and finite"):
        await learner.client.set_priorities("train", 1, {heavy: math.inf})


def test_the_race_draws_in_proportion_to_the_weights() -> None:
    """Half of the groups weigh three times as much; those drawn enter again, as groups that are used again do."""
    draws, race, rng = Counter[str](), 0.0, random.Random(1)
    weights = {f"g{i}": (3 if i % 2 else 1) * WEIGHT_UNIT for i in range(20)}
    entries = dict.fromkeys(weights, 0)

    def enter(group: str, at: float) -> float:
        entries[group] += 1
        return draw_key(group, entries[group], 5, weights[group], at)

    keys = {group: enter(group, race) for group in weights}
    for _ in range(8000):
        drawn = min(keys, key=lambda g: keys[g])
        race = keys.pop(drawn)
        draws[drawn] += 1
        if rng.random() < 0.5:  # entering later, or at another time than it left, changes no odds
            other = rng.choice(list(keys))
            keys[other] = enter(other, race)
        keys[drawn] = enter(drawn, race)
    heavy = sum(count for group, count in draws.items() if weights[group] > WEIGHT_UNIT)
    assert heavy / 8000 == pytest.approx(0.75, abs=0.02)
    assert max(draws.values()) < 1.3 * 8000 * 3 / 40


@given(priority=st.floats(1e-12, 1e12), exponent=st.floats(0, 2))
def test_weights_are_positive_integers_of_bounded_size(priority: float, exponent: float) -> None:
    weight = weight_of(priority, exponent)
    assert isinstance(weight, int)
    assert 1 <= weight <= 1e12
