"""Generators as processes of their own: empty directory, kill -9, signals."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

from protos import trajectory_pb2
from tests.generators.world import DEADLINE_S, mesh


async def test_processes_with_nothing_but_the_address(tmp_path: Path) -> None:
    """Two generators in empty directories; one is killed with sequences in hand, the other one ends by signal."""
    async with mesh(
        tmp_path, endless=True, rollout__max_response_tokens=700, rollout__slots=8, learner__batch__groups=6
    ) as world:
        learner = await world.learner()
        await learner.publish(0)
        victim, survivor = await world.process("gen-1"), await world.process("gen-2")
        await world.holds_weights("gen-1")
        await world.holds_weights("gen-2")
        await learner.seed(6)
        await world.holds(await world.control("gen-1"))
        victim.kill()
        await victim.wait()
        batch = await learner.sample(6, 0)
        assert {group.group_id for group in batch} == {f"train-{number}" for number in range(1, 7)}
        again = [group for group in batch if group.attempt == 2]
        assert again, "what the victim held was admitted again"
        for group in again:
            # What the victim had stored stays; the rest is the survivor's.
            assert any(member.generator == "gen-2" for member in group.members)
        for group in batch:
            assert [member.outcome for member in group.members] == [trajectory_pb2.OUTCOME_SCORED] * 4
        ledger = await learner.client.ledger("train")
        assert not ledger.discrepancies
        assert ledger.counters.readmissions == len(again)

        ready = json.loads((tmp_path / "gen-2.ready").read_text())
        assert ready["pid"] == survivor.pid
        survivor.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(survivor.wait(), DEADLINE_S) == 0
        assert "gen-2" not in await world.members()
        for name in ("gen-1", "gen-2", "tmp"):
            assert not list((tmp_path / name).iterdir()), "nothing is left behind"
