"""Wherever a learner is killed around a checkpoint, and whatever was in it, the next one continues."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from rollmesh.learner.checkpoint.digests import check_actor_digests
from rollmesh.learner.checkpoint.names import version_of
from rollmesh.learner.recovery.consumption_log import surviving_uses
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.runtime.threads import thread_environment
from tests import fork_server
from tests.learner.live import killed
from tests.learner.live.test_runs import ask, assert_nothing_twice, ledger, records, summary, uses
from tests.learner.live.tiny import make_config, mesh_of, run_learner

# Files that each learner adds to the folder, and the version from which it began.
KILLED = -signal.SIGKILL
EXPECTED = {
    "first_claim_refused": (0, {"i0001-v00000000"}, None),
    "first_steps_not_finite": (0, {"i0002-v00000002"}, 0),
    "killed_while_it_copies": (KILLED, {"i0002-v00000002", ".partial-i0003-v00000004"}, 2),
    "killed_while_it_writes": (KILLED, {"i0002-v00000002", ".partial-i0004-v00000004"}, 2),
    "killed_before_the_digests": (KILLED, {"i0002-v00000002", ".partial-i0005-v00000004"}, 2),
    "killed_before_the_rename": (KILLED, {"i0002-v00000002", ".partial-i0006-v00000004"}, 2),
    "killed_before_the_commit": (KILLED, {"i0002-v00000002", "i0007-v00000004"}, 2),
    "killed_after_the_commit": (KILLED, {"i0002-v00000002", "i0007-v00000004", "i0008-v00000006"}, 4),
    "killed_while_it_removes": (
        KILLED,
        {".removed-i0002-v00000002", "i0007-v00000004", "i0008-v00000006", "i0009-v00000008"},
        6,
    ),
    "killed_three_steps_into_a_write": (
        KILLED,
        {"i0007-v00000004", "i0008-v00000006", "i0009-v00000008", ".partial-i0010-v00000009"},
        8,
    ),
    "killed_after_a_late_commit": (
        KILLED,
        {"i0007-v00000004", "i0008-v00000006", "i0009-v00000008", "i0011-v00000009"},
        8,
    ),
    "none": (0, {"i0012-v00000012"}, 9),
}
# Groups that were used after the last commit: the successor is offered them again.
UNCOMMITTED = {"killed_three_steps_into_a_write": 4 * 4, "killed_after_a_late_commit": 3 * 4}
STEPS = 12


@pytest.mark.slow
def test_a_learner_killed_in_any_phase_of_a_checkpoint_is_continued(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        {
            "learner.steps": STEPS,
            "checkpoint.every_steps": 2,
            "checkpoint.every_s": None,
            "checkpoint.keep": 1,
            "data.eval": None,
            # Wide enough that no group of the discarded versions is over the bound afterwards.
            "buffer.max_staleness": 40,
        },
    )
    assert EXPECTED.keys() == killed.FAULTS.keys()
    (tmp_path / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    checkpoints = config.run.folder / "checkpoints"
    environment = {**os.environ, **thread_environment(1)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with mesh_of(config) as mesh, (tmp_path / "log").open("w") as log:
        arguments = [str(tmp_path / "config.json"), mesh]
        with fork_server.popen(arguments, module=killed.__name__, env=environment, stderr=log, **pipes) as learners:
            assert learners.stdin is not None
            assert learners.stdout is not None
            for fault, (status, left, _) in EXPECTED.items():
                print(fault, file=learners.stdin, flush=True)
                assert learners.stdout.readline().strip() == str(status), (tmp_path / "log").read_text()[-6000:]
                assert {path.name for path in checkpoints.glob("*/")} == left, fault
                _check_latest(mesh, fault)
                if fault == "killed_before_the_commit":
                    _refuse_damage(config, mesh, checkpoints / "i0007-v00000004" / "__0_0.distcp")
        assert ledger(mesh).recounted.trained == STEPS * 4
    began = {use.incarnation: use.resumed_at for use in uses(config)}
    assert began == {i: at for i, (_, _, at) in enumerate(EXPECTED.values(), start=1) if at is not None}
    # All groups that were used and undone were offered again; committed ones were not.
    assert_nothing_twice(config)
    assert {g.group_id for use in uses(config) for g in use.groups} == {
        g.group_id for use in surviving_uses(uses(config)) for g in use.groups
    }
    assert [r["step"] for r in records(config)][-2:] == [STEPS - 1, STEPS]
    assert summary(config)["steps"] == STEPS


def _check_latest(mesh: str, fault: str) -> None:
    """The checkpoint that the buffer names is whole, and holds the steps of all groups that count as trained."""
    latest = Path(asyncio.run(ask(mesh, lambda client: client.describe("train"))).latest_checkpoint)
    check_actor_digests(latest)
    version, counts = version_of(latest.name), ledger(mesh).recounted
    assert version is not None
    assert counts.trained == version.version * 4, fault
    assert counts.consumed == UNCOMMITTED.get(fault, counts.consumed), fault


def _refuse_damage(config: Config, mesh: str, file: Path) -> None:
    """A start on a checkpoint whose bytes have changed commits nothing: its steps may have to be undone."""
    committed = ledger(mesh).recounted.trained
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert run_learner(config, mesh) == DataError.exit_code
    assert ledger(mesh).recounted.trained == committed
    file.write_bytes(content)
