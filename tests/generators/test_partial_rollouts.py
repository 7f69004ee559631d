"""A response that several generators and several versions have made: what was sampled stays, and the rest follows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from rollmesh.mesh.trajectory.payload_codec import decode
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import generator_pb2
from tests.generators.pacing import Pace
from tests.generators.world import eventually, log_probs, mesh

_TOKENS, _BOUND, _SLOTS, _GROUPS = 120, 30, 6, 2


async def test_a_member_cut_by_an_update_goes_on_elsewhere(tmp_path: Path, pace: Pace) -> None:
    """Update mode `interrupt` stops its sequences and puts them back in the queue, after which their generator is
    drained. Another one continues from the drafts, with the versions and log-probs that came with them and what is left
    of the budget."""
    v0, v1, v2 = (PolicyVersion(1, version) for version in range(3))
    pace.tokens = _BOUND
    async with mesh(
        tmp_path,
        endless=True,
        weights__kv="interrupt",
        rollout__max_response_tokens=_TOKENS,
        rollout__slots=_SLOTS,
        rollout__draft_every_s=0.2,
        rollout__draft_every_tokens=10,
        buffer__lease_s=60.0,
        buffer__reconnect_grace_s=59.0,
    ) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(_GROUPS)
        task, _ = world.generator("gen-1")
        control = await world.control("gen-1")
        await world.holds(control, _GROUPS)
        await learner.publish(1)
        await learner.swapped(2)
        pace.tokens = 2 * _BOUND

        async def crossed() -> bool:
            """A response with tokens of both versions is in the buffer."""
            return any(draft.versions.versions == (v0, v1) for draft in (await world.drafts()).values())

        await eventually(crossed)
        await control.Drain(generator_pb2.DrainRequest(timeout_ms=1), timeout=180)
        assert await asyncio.wait_for(task, 240) == 0
        pace.tokens = None
        drafts = await world.drafts()
        await learner.publish(2)
        world.generator("gen-2")
        batch = await learner.sample(_GROUPS, 2)
        models = {PolicyVersion(1, version): world.model(version) for version in range(3)}
        elsewhere = 0
        for group in batch:
            prompt = np.frombuffer(group.task.prompt_ids, "<i4").tolist()
            for meta, payload in zip(group.members, learner.payloads[group.group_id], strict=True):
                found = decode(payload)
                response = found.response_ids.tolist()
                assert len(response) == meta.response_tokens == _TOKENS
                assert list(found.versions) == sorted(found.versions)
                expected = {version: log_probs(model, prompt, response) for version, model in models.items()}
                scores = [expected[version][index] for index, version in enumerate(found.versions)]
                np.testing.assert_allclose(found.log_probs, scores, atol=1e-4)
                draft = drafts.get((group.group_id, meta.member))
                if draft is None or meta.generator == "gen-1":
                    continue
                count = len(draft.response_ids)
                assert response[:count] == draft.response_ids.tolist()
                np.testing.assert_array_equal(found.log_probs[:count], draft.log_probs)
                assert list(found.versions)[:count] == list(draft.versions)
                assert set(list(found.versions)[count:]) == {v2}
                elsewhere += draft.versions.versions == (v0, v1)
        assert elsewhere, "no response of all three versions"
