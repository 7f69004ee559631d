"""A generator whose machine is taken away: it drains within the time of the notice, and others continue its work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from aiohttp.test_utils import TestServer

from rollmesh.mesh.trajectory.payload_codec import decode
from rollmesh.protos import generator_pb2, trajectory_pb2
from tests.generators.world import eventually, log_probs, mesh
from tests.mesh.preemption.metadata import MetadataServices

_TOKENS, _BOUND, _GROUPS, _LEFT_S = 60, 20, 2, 12.0
_ASK_OFTEN = "import rollmesh.mesh.preemption.watcher as its; its._EVERY_S = 0.05"


@pytest.mark.slow
async def test_a_notice_drains_in_time_and_responses_continue_elsewhere(tmp_path: Path) -> None:
    """No draft is due by itself, and leases are long: what another generator continues is the drain's work alone. No
    response ends, so that nothing but the notice ends the drain."""
    services = MetadataServices()
    services.left_s = _LEFT_S
    async with (
        TestServer(services.application()) as metadata,
        mesh(
            tmp_path,
            endless=True,
            rollout__max_response_tokens=_TOKENS,
            rollout__slots=8,
            rollout__draft_every_s=3600.0,
            rollout__draft_every_tokens=10 * _TOKENS,
            buffer__lease_s=600.0,
            buffer__reconnect_grace_s=590.0,
        ) as world,
    ):
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(_GROUPS)
        notice = ["--notice", f"aws={metadata.make_url('/')}"]
        process = await world.process("gen-1", _ASK_OFTEN, bound=_BOUND, options=notice)
        control = await world.control("gen-1")

        async def all_have_tokens() -> bool:
            status = await control.Status(generator_pb2.GeneratorStatusRequest(), timeout=60)
            return bool(status.groups_held == _GROUPS and status.tokens_generated >= 5 * 4 * _GROUPS)

        await eventually(all_have_tokens)
        assert not await world.drafts()
        services.preempted = True
        assert await process.wait() == 0
        assert "gen-1" not in await world.members()
        drafts = await world.drafts()
        assert len(drafts) == 4 * _GROUPS

        world.generator("gen-2")
        batch = await learner.sample(_GROUPS, 0)
        for group in batch:
            prompt = np.frombuffer(group.task.prompt_ids, "<i4").tolist()
            for meta, payload in zip(group.members, learner.payloads[group.group_id], strict=True):
                draft, found = drafts[(group.group_id, meta.member)], decode(payload)
                count = len(draft)
                assert 0 < count < len(found) == _TOKENS
                assert found.response_ids[:count].tolist() == draft.response_ids.tolist()
                np.testing.assert_array_equal(found.log_probs[:count], draft.log_probs)
                expected = log_probs(world.model(0), prompt, found.response_ids.tolist())
                np.testing.assert_allclose(found.log_probs, expected, atol=1e-4)
                assert (meta.generator, meta.outcome) == ("gen-2", trajectory_pb2.OUTCOME_SCORED)
        ledger = await learner.client.ledger("train")
        assert not ledger.discrepancies
        assert (ledger.counters.admitted, ledger.counters.readmissions) == (_GROUPS, _GROUPS)
