"""`placement: auto` in a real mesh: measured, tried and chosen, with every group trained once."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest

from rollmesh.launcher.trials.record import read_record
from tests.command import Command
from tests.integration import brief_trials
from tests.integration.mesh import MeshRun, audit


@pytest.mark.slow
def test_auto_tries_placements_and_keeps_the_fastest(start_mesh: Callable[..., MeshRun], rollmesh: Command) -> None:
    """Learner and generator are replaced amid the run; whatever this machine finds faster stays."""
    run = start_mesh(
        "--placement=auto",
        "--placement.trial_batches=2",
        "--rollout.replicas=1",
        "--learner.batch.groups=8",
        "--eval.every_steps=100000",
        # A trial always pays off before the end.
        "--learner.steps=100000",
        module=brief_trials.__name__,
    )
    run.wait_for("placement auto: measures .* batches or more in turns")
    run.wait_for("placement collocated: .* s a batch, measured over")
    run.wait_for("placement auto: estimates, seconds per batch: split .* to .* s; hybrid")
    tried = run.wait_for("placement auto tries (split|hybrid)")[1]
    chosen = run.wait_for("placement auto chose (split|collocated|hybrid) at step")[1]
    status = rollmesh("status", str(run.folder))
    assert f"auto chose {chosen}" in status.stdout, status.stdout
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 128 + signal.SIGINT, run.tail()
    audit(run)
    record = read_record(run.folder)
    assert record is not None
    assert record.decided
    assert {"collocated", tried} <= {one.placement for one in record.measured}
    fastest = min(one.batch_s for one in record.measured if one.batch_s is not None)
    assert next(one.batch_s for one in record.measured if one.placement == chosen) == pytest.approx(fastest, rel=0.04)
    placement = json.loads((run.folder / "summary.json").read_text())["placement"]
    assert (placement["asked"], placement["mode"]) == ("auto", chosen)
    assert placement["change_s"] > 0
