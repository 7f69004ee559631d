"""Services of a real run that stop answering: each is killed, comes back, and the run trains on."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from mesh.liveness.ends import survivors
from tests.integration.mesh import MeshRun, audit

BOUND_S = 4.0


def frozen(run: MeshRun, *services: str) -> None:
    """Waits until services were found stopped, are back, and a step was trained after that."""
    found = (rf"{service}: frozen \(stopped by a signal.*, killed; restarting" for service in services)
    run.wait_for_each(*found, *(rf"{service} is back" for service in services))
    run.wait_for(r"step \d+: reward")


def tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_service_that_freezes_is_killed_and_the_run_trains_on(start_mesh) -> None:
    """A reward service, a learner and a generator that stop together; then the front with its Redis."""
    run = start_mesh(
        *("--rollout.replicas=1", "--buffer.lease_s=4", "--buffer.reconnect_grace_s=0.5", "--checkpoint.every_s=2"),
        *("--eval.every_steps=100000", "--learner.steps=100000"),
        *(f"--resources.frozen_after_s={BOUND_S}", "--network.retry_s=90"),
    )
    run.wait_step(3)
    members = ("reward", "learner", "generator-0")
    for service in members:
        os.kill(run.pid(service), signal.SIGSTOP)
    frozen(run, *members)
    front = tree(run.pid("buffer"))
    assert len(front) > 1, "Redis is below the front"
    for process in front:
        process.suspend()
    frozen(run, "buffer")
    assert survivors(process.pid for process in front) == set()

    run.process.send_signal(signal.SIGINT)
    assert run.finish(120) == 130, run.tail()
    audit(run)
    restarts = run.summary()["restarts"]
    assert {service: reasons.get("frozen") for service, reasons in restarts.items()} == {
        "reward": 1,
        "learner": 1,
        "generator-0": 1,
        "buffer": 1,
    }, restarts
