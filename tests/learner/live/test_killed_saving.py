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

# By learner: its exit code; the folders that are there then, with the learners that have left them; and the version
# from which it began.
KILLED = -signal.SIGKILL
EXPECTED = {
    "first_claim_refused": (0, "{first_claim_refused}-v00000000", None),
    "first_steps_not_finite": (0, "{first_steps_not_finite}-v00000002", 0),
    "killed_while_it_copies": (
        KILLED,
        "{first_steps_not_finite}-v00000002 .partial-{killed_while_it_copies}-v00000004",
        2,
    ),
    "killed_while_it_writes": (
        KILLED,
        "{first_steps_not_finite}-v00000002 .partial-{killed_while_it_writes}-v00000004",
        2,
    ),
    "killed_before_the_digests": (
        KILLED,
        "{first_steps_not_finite}-v00000002 .partial-{killed_before_the_digests}-v00000004",
        2,
    ),
    "killed_before_the_rename": (
        KILLED,
        "{first_steps_not_finite}-v00000002 .partial-{killed_before_the_rename}-v00000004",
        2,
    ),
    "killed_before_the_commit": (
        KILLED,
        "{first_steps_not_finite}-v00000002 {killed_before_the_commit}-v00000004",
        2,
    ),
    "killed_after_the_commit": (
        KILLED,
        "{first_steps_not_finite}-v00000002 {killed_before_the_commit}-v00000004 {killed_after_the_commit}-v00000006",
        4,
    ),
    "killed_while_it_removes": (
        KILLED,
        ".removed-{first_steps_not_finite}-v00000002 {killed_before_the_commit}-v00000004 "
        "{killed_after_the_commit}-v00000006 {killed_while_it_removes}-v00000008",
        6,
    ),
    "killed_three_steps_into_a_write": (
        KILLED,
        "{killed_before_the_commit}-v00000004 {killed_after_the_commit}-v00000006 "
        "{killed_while_it_removes}-v00000008 .partial-{killed_three_steps_into_a_write}-v00000009",
        8,
    ),
    "killed_after_a_late_commit": (
        KILLED,
        "{killed_before_the_commit}-v00000004 {killed_after_the_commit}-v00000006 "
        "{killed_while_it_removes}-v00000008 {killed_after_a_late_commit}-v00000009",
        8,
    ),
    "none": (0, "{none}-v00000012", 9),
}
# They leave parts of a folder, as the one that is killed before the rename does. `test_killed_writes` stops a writer
# after each of its operations.
ALSO_LEAVE_PARTS = {"killed_while_it_copies", "killed_while_it_writes", "killed_before_the_digests"}
# Groups that were used after the last commit: the successor is offered them again.
UNCOMMITTED = {"killed_three_steps_into_a_write": 4 * 4, "killed_after_a_late_commit": 3 * 4}
STEPS = 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        [name for name in EXPECTED if name not in ALSO_LEAVE_PARTS],
        pytest.param([*EXPECTED], marks=pytest.mark.exhaustive),
    ],
    ids=["each kind of rest", "each phase"],
)
def test_a_learner_killed_in_any_phase_of_a_checkpoint_is_continued(tmp_path: Path, faults: list[str]) -> None:
    learners_of = {name: f"i{number:04d}" for number, name in enumerate(faults, start=1)}
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
            for fault in faults:
                status, left, _ = EXPECTED[fault]
                print(fault, file=learners.stdin, flush=True)
                assert learners.stdout.readline().strip() == str(status), (tmp_path / "log").read_text()[-6000:]
                assert {path.name for path in checkpoints.glob("*/")} == {*left.format(**learners_of).split()}, fault
                _check_latest(mesh, fault)
                if fault == "killed_before_the_commit":
                    _refuse_damage(config, mesh, checkpoints / f"{learners_of[fault]}-v00000004" / "__0_0.distcp")
        assert ledger(mesh).recounted.trained == STEPS * 4
    began = {use.incarnation: use.resumed_at for use in uses(config)}
    began_at = [EXPECTED[fault][2] for fault in faults]
    assert began == {i: at for i, at in enumerate(began_at, start=1) if at is not None}
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
