"""A whole run whose critic and reference are elsewhere: either is killed, nothing is lost or trained twice."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, list_checkpoints
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import RoleLostError
from tests.learner.live.role_process import RoleProcess, served, write_config
from tests.learner.live.test_runs import assert_nothing_twice, ledger, records, wait_for_line
from tests.learner.live.tiny import make_config, meanwhile, mesh_of, run_learner

STEPS, SAVED = 6, 2
# The last version that is trained before the critic is killed.
LAST = SAVED + 2
DEADLINE_S = 240.0


def after_step(config: Config, version: int) -> None:
    wait_for_line(config.run.folder / "consumption.jsonl", lambda line: line["train_version"] == version, DEADLINE_S)


@pytest.mark.slow
def test_a_killed_reference_costs_nothing_and_a_killed_critic_the_steps_since_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, killed = BufferClient.claim, threading.Event()

    async def claim_after_the_kill(self: BufferClient, table: str, incarnation: int, version: int, leases: Any) -> Any:
        if version > LAST:
            assert await asyncio.to_thread(killed.wait, DEADLINE_S)
        return await claim(self, table, incarnation, version, leases)

    # The learner would be done first where the machine is busy.
    monkeypatch.setattr(BufferClient, "claim", claim_after_the_kill)
    changes = {
        "learner.roles": {"critic": {"at": "elsewhere"}, "reference": {"at": "elsewhere"}},
        "algorithm.name": "ppo",
        "algorithm.kl": {"where": "reward", "coefficient": 0.1},
        "learner.steps": STEPS,
        "checkpoint.every_s": None,
        "checkpoint.every_steps": SAVED,
        "data.eval": None,
    }
    config = make_config(tmp_path, changes)
    write_config(config, tmp_path)
    with ExitStack() as closers, mesh_of(config) as mesh:
        critic, reference = (
            closers.enter_context(served(RoleProcess(name, mesh, tmp_path))) for name in ("critic", "reference")
        )

        def kill_both() -> None:
            after_step(config, 1)
            reference.kill_and_start()
            after_step(config, LAST)
            critic.kill_and_start()
            killed.set()

        with meanwhile(kill_both):
            assert run_learner(config, mesh) == RoleLostError.exit_code, critic.log() + reference.log()
        saved = max(version.version for version, _ in list_checkpoints(config.run.folder / CHECKPOINTS_NAME))
        assert SAVED <= saved < STEPS
        assert run_learner(config, mesh, takeover=True) == 0, critic.log()
        # It must balance.
        assert ledger(mesh).recounted.trained == STEPS * 4
        # They leave with the run.
        assert [role.process.wait(240) for role in (critic, reference)] == [0, 0]
    steps = [record["step"] for record in records(config) if "tokens_per_second" in record]
    assert steps[-1] == STEPS
    assert saved + 1 in steps
    assert all("critic/vf_loss" in record for record in records(config) if "tokens_per_second" in record)
    assert_nothing_twice(config)
