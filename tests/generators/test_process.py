"""Generators as processes of their own: empty directory, a stalled node, kill -9, signals."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

from protos import generator_pb2, trajectory_pb2
from tests.generators.world import DEADLINE_S, eventually, mesh


async def test_processes_with_nothing_but_the_address(tmp_path: Path) -> None:
    """Two generators in empty directories. One stalls beyond its leases, comes back, and is killed at work; the other
    one takes over each time and ends by signal."""
    async with mesh(
        tmp_path,
        endless=True,
        rollout__max_response_tokens=700,
        rollout__slots=8,
        learner__batch__groups=6,
        buffer__lease_s=2.0,
    ) as world:
        learner = await world.learner()
        await learner.publish(0)
        victim, survivor = await world.process("gen-1"), await world.process("gen-2")
        await world.holds_weights("gen-1")
        await world.holds_weights("gen-2")
        control = await world.control("gen-1")

        await learner.seed(6)
        await world.holds(control)
        victim.send_signal(signal.SIGSTOP)
        batch = await learner.train(0)
        readmitted = [group for group in batch if group.attempt == 2]
        assert readmitted, "its leases ran out"
        victim.send_signal(signal.SIGCONT)

        async def has_given_up() -> bool:
            status = await control.Status(generator_pb2.GeneratorStatusRequest(), timeout=10)
            return status.groups_held == 0 and status.serving.version == 1

        await eventually(has_given_up)
        ledger = await learner.client.ledger("train")
        assert ledger.counters.superseded_writes, "its late work was refused"
        assert not ledger.discrepancies

        await learner.seed(6)
        await world.holds(control)
        victim.kill()
        await victim.wait()
        batch = await learner.train(1)
        again = [group for group in batch if group.attempt == 2]
        assert again, "what the victim held was admitted again"
        for group in again:
            # What the victim had stored stays; the rest is the survivor's.
            assert any(member.generator == "gen-2" for member in group.members)
        for group in batch:
            assert [member.outcome for member in group.members] == [trajectory_pb2.OUTCOME_SCORED] * 4
        ledger = await learner.client.ledger("train")
        assert not ledger.discrepancies
        assert ledger.counters.readmissions == len(readmitted) + len(again)
        assert ledger.counters.consumed == 12

        ready = json.loads((tmp_path / "gen-2.ready").read_text())
        assert ready["pid"] == survivor.pid
        survivor.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(survivor.wait(), DEADLINE_S) == 0
        assert "gen-2" not in await world.members()
        for name in ("gen-1", "gen-2", "tmp"):
            assert not list((tmp_path / name).iterdir()), "nothing is left behind"
