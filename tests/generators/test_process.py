"""Generators as processes of their own: empty directory, a stalled node, kill -9, signals."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from rollmesh.mesh.trajectory.payload_codec import Trajectory, decode
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2, generator_pb2, trajectory_pb2
from tests.generators.world import DEADLINE_S, eventually, log_probs, mesh

_TOKENS, _BOUND = 80, 25


@pytest.mark.slow
async def test_processes_with_nothing_but_the_address(tmp_path: Path) -> None:
    """Two generators in empty directories. One stalls beyond its leases, comes back, and is killed amid long responses.
    The other one takes over each time, continues from the victim's drafts, and ends by signal."""
    async with mesh(
        tmp_path,
        endless=True,
        rollout__max_response_tokens=_TOKENS,
        rollout__slots=8,
        learner__batch__groups=4,
        rollout__draft_every_s=0.2,
        rollout__draft_every_tokens=10,
        buffer__lease_s=4.0,
    ) as world:
        learner = await world.learner()
        await learner.publish(0)
        victim, survivor = await world.process("gen-1", bound=_BOUND), await world.process("gen-2")
        await world.holds_weights("gen-1")
        await world.holds_weights("gen-2")
        control = await world.control("gen-1")

        await learner.seed(4)
        await world.holds(control)
        victim.send_signal(signal.SIGSTOP)
        batch = await learner.train(0)
        readmitted = [group for group in batch if group.attempt > 1]
        assert readmitted, "its leases ran out"
        victim.send_signal(signal.SIGCONT)

        async def has_given_up() -> bool:
            status = await control.Status(generator_pb2.GeneratorStatusRequest(), timeout=60)
            return status.groups_held == 0 and status.serving.version == 1

        await eventually(has_given_up)
        ledger = await learner.client.ledger("train")
        assert not ledger.discrepancies

        # Stopped while there is nothing to do, the survivor draws nothing, and so drafts nothing.
        survivor.send_signal(signal.SIGSTOP)
        await learner.seed(4)

        async def is_drafted() -> bool:
            return len(await world.drafts()) >= 4

        await eventually(is_drafted)
        victim.kill()
        await victim.wait()
        drafts = await world.drafts()
        survivor.send_signal(signal.SIGCONT)
        batch = await learner.train(1)
        again = [group for group in batch if group.attempt > 1]
        assert again, "what the victim held was admitted again"
        for group in again:
            # Members that the victim had stored stay; the rest is the survivor's.
            assert any(member.generator == "gen-2" for member in group.members)
        for group in batch:
            assert [member.outcome for member in group.members] == [trajectory_pb2.OUTCOME_SCORED] * 4
        check_continuations(world.model(1), batch, learner.payloads, drafts)
        ledger = await learner.client.ledger("train")
        assert not ledger.discrepancies
        assert ledger.counters.readmissions == sum(group.attempt - 1 for group in (*readmitted, *again))
        assert ledger.counters.consumed == 8

        ready = json.loads((tmp_path / "gen-2.ready").read_text())
        assert ready["pid"] == survivor.pid
        survivor.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(survivor.wait(), DEADLINE_S) == 0
        assert "gen-2" not in await world.members()
        for name in ("gen-1", "gen-2", "tmp"):
            assert not list((tmp_path / name).iterdir()), "nothing is left behind"


def check_continuations(
    model: PreTrainedModel,
    batch: Sequence[buffer_pb2.LeasedGroup],
    payloads: Mapping[str, Sequence[bytes]],
    drafts: Mapping[tuple[str, int], Trajectory],
) -> None:
    """Every response of which there was a draft begins with it, and is whole: tokens, log-probs, versions, meta."""
    assert drafts
    members = {
        (group.group_id, meta.member): (group, meta, decode(payload))
        for group in batch
        for meta, payload in zip(group.members, payloads[group.group_id], strict=True)
    }
    for place, draft in drafts.items():
        group, meta, found = members[place]
        count = len(draft.response_ids)
        assert len(found.response_ids) == meta.response_tokens == _TOKENS
        assert meta.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
        assert found.response_ids[:count].tolist() == draft.response_ids.tolist()
        np.testing.assert_array_equal(found.log_probs[:count], draft.log_probs)
        assert found.versions.runs == ((_TOKENS, PolicyVersion(1, 1)),)
        prompt = np.frombuffer(group.task.prompt_ids, "<i4").tolist()
        np.testing.assert_allclose(found.log_probs, log_probs(model, prompt, found.response_ids.tolist()), atol=1e-4)
    assert any(members[place][1].generator == "gen-2" for place in drafts), "all were finished by the victim"


async def test_one_that_loads_its_model_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    """The thread that loads cannot be ended, and does not keep the process from its end."""
    slow = "import time, rollmesh.generators.generator as its; its.load_engine = lambda *_, **__: time.sleep(99)"
    left = tmp_path / "tmp" / "rollmesh-model-left"
    left.mkdir(parents=True)
    async with mesh(tmp_path) as world:
        learner = await world.learner()
        await learner.publish(0)
        process = await world.process("gen-1", slow)
        control = await world.control("gen-1")

        async def loads() -> bool:
            status = await control.Status(generator_pb2.GeneratorStatusRequest(), timeout=60)
            return bool(status.waiting_reason == "loads the model")

        await eventually(loads)
        assert not left.exists(), "its generator was killed: its lock is free"
        assert len(list(left.parent.glob("rollmesh-model-*"))) == 1
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 120) == 0
        assert "gen-1" not in await world.members()
