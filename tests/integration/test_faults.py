"""The launcher's answer to deaths and silence: services start again, Ctrl-C drains, a dead launcher's run continues.

Effects of faults on the mesh itself, each service alone and together: tests/faults.
"""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from rollmesh.mesh.liveness.process_ends import survivors
from rollmesh.mesh.weights.shared_files import FILE_PREFIX, SHARED_MEMORY
from tests.integration import paced
from tests.integration.mesh import MeshRun, audit

CRITIC = "role-critic"
SERVICES = ("buffer", "reward", "generator-0", "learner", CRITIC)
SETTINGS = (
    *("--rollout.replicas=1", "--buffer.lease_s=4", "--buffer.reconnect_grace_s=0.5", "--checkpoint.every_s=2"),
    *("--eval.every_steps=100000", "--learner.steps=100000", "--resources.frozen_after_s=4"),
    *(
        "--network.retry_s=90",
        "--learner.batch.groups=4",
        "--rollout.n=4",
        f"--reward.functions=['{paced.__file__}:score']",
    ),
    *("--algorithm=ppo", "--learner.roles={critic: {at: own}}"),
)


def frozen(run: MeshRun, *services: str) -> None:
    """Waits until services were found stopped, are back, and a step was trained after that."""
    found = (rf"{service}: frozen \(stopped by a signal.*, killed; restarting" for service in services)
    run.wait_for_each(*found, *(rf"{service} is back" for service in services))
    run.wait_for(r"step \d+ of \d+: reward")


def tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


@pytest.mark.slow
def test_a_run_outlives_its_services_and_its_launcher_until_a_ctrl_c(start_mesh) -> None:
    """Services freeze and are killed, and last of all the launcher. The next one continues, and drains at Ctrl-C."""
    first = start_mesh(*SETTINGS)
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
    # Its model is lost with it: the learner ends too, and both continue from the last checkpoint.
    first.kill9(CRITIC)
    first.wait_for_each(rf"{CRITIC} is back", "learner is back")
    first.wait_for(r"step \d+ of \d+: reward")
    family = [process.pid for process in psutil.Process(first.process.pid).children(recursive=True)]
    assert len(family) > len(SERVICES), "the services and Redis"
    first.process.kill()
    first.process.wait()

    second = start_mesh(*SETTINGS)
    second.wait_for("continues in")
    second.wait_step(first.last_step() + 1)
    assert survivors(family) == set(), "a service outlived its launcher"
    pids = [second.pid(service) for service in SERVICES]
    # As a killed learner leaves its versions: not locked.
    left = SHARED_MEMORY / f"{FILE_PREFIX}left-{os.getpid()}"
    left.touch()
    second.process.send_signal(signal.SIGINT)
    assert second.finish() == 130, second.tail()
    assert not left.exists()
    assert survivors(pids) == set()
    audit(second)
    assert second.summary()["restarts"] == {
        "reward": {"frozen": 1},
        "generator-0": {"frozen": 1},
        "learner": {"frozen": 1, "exit": 1},
        "buffer": {"frozen": 1},
        CRITIC: {"exit": 1},
    }
