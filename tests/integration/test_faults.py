"""What the launcher does about deaths and silence: services are started again, Ctrl-C drains, a dead launcher's run
continues.

What faults do to the mesh itself, each service alone and together: tests/faults.
"""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from mesh.liveness.ends import survivors
from tests.integration.mesh import MeshRun, audit

SERVICES = ("buffer", "reward", "generator-0", "learner")
SETTINGS = (
    *("--rollout.replicas=1", "--buffer.lease_s=4", "--buffer.reconnect_grace_s=0.5", "--checkpoint.every_s=2"),
    *("--eval.every_steps=100000", "--resources.frozen_after_s=4", "--network.retry_s=90"),
)
ENDLESS = "--learner.steps=100000"


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
def test_a_run_outlives_its_services_a_ctrl_c_and_its_launcher(start_mesh) -> None:
    """Three starts of one run: services freeze and Ctrl-C comes; services and the launcher are killed; it goes to its
    end."""
    first = start_mesh(*SETTINGS, ENDLESS)
    first.wait_step(3)
    # All members stop together; then the front with its Redis.
    members = ("reward", "learner", "generator-0")
    for service in members:
        os.kill(first.pid(service), signal.SIGSTOP)
    frozen(first, *members)
    front = tree(first.pid("buffer"))
    assert len(front) > 1, "Redis is below the front"
    for process in front:
        process.suspend()
    frozen(first, "buffer")
    assert survivors(process.pid for process in front) == set()
    pids = [first.pid(service) for service in SERVICES]
    first.process.send_signal(signal.SIGINT)
    assert first.finish(120) == 130, first.tail()
    assert survivors(pids) == set()
    audit(first)
    restarts = first.summary()["restarts"]
    assert {service: reasons.get("frozen") for service, reasons in restarts.items()} == dict.fromkeys(SERVICES, 1)
    reached = first.last_step()

    second = start_mesh(*SETTINGS, ENDLESS)
    second.wait_for("continues in")
    second.wait_step(reached + 1)
    for service in ("learner", "buffer"):
        before = second.pid(service)
        second.kill9(service)
        second.wait_for(rf"{service} is back")
        assert second.pid(service) != before
        second.wait_for(r"step \d+: reward")
    family = [process.pid for process in psutil.Process(second.process.pid).children(recursive=True)]
    assert len(family) > len(SERVICES), "the services and Redis"
    second.process.kill()
    second.process.wait(10)
    reached = second.last_step()

    third = start_mesh(*SETTINGS, f"--learner.steps={reached + 30}")
    third.wait_for("continues in")
    third.wait_step(reached + 1)
    assert survivors(family) == set(), "a service outlived its launcher"
    assert third.finish(120) == 0, third.tail()
    audit(third)
    assert third.summary()["steps"] == reached + 30
