"""What the launcher does about deaths: services are started again, Ctrl-C drains, a dead launcher's run goes on.

What faults do to the mesh itself, each service alone and together: tests/faults.
"""

import signal

import psutil
import pytest

from mesh.liveness.ends import survivors
from tests.integration.mesh import audit

SHORT = ("--rollout.replicas=2", "--buffer.lease_s=4", "--buffer.reconnect_grace_s=0.5", "--checkpoint.every_steps=7")
SERVICES = ("buffer", "reward", "generator-0", "generator-1", "learner")
STEPS = 70


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_outlives_its_services_a_ctrl_c_and_its_launcher(start_mesh) -> None:
    """Three starts of one run: services are killed and Ctrl-C comes; the launcher is killed; it goes to its end."""
    first = start_mesh(*SHORT, f"--learner.steps={STEPS}")
    first.wait_step(5)
    for service in ("learner", "buffer"):
        before = first.pid(service)
        first.kill9(service)
        first.wait_for(rf"{service} is back")
        assert first.pid(service) != before
        first.wait_for(r"step \d+: reward")
    pids = [first.pid(service) for service in SERVICES]
    first.process.send_signal(signal.SIGINT)
    assert first.finish(60) == 130, first.tail()
    assert survivors(pids) == set()
    audit(first)
    reached = first.last_step()

    second = start_mesh(*SHORT, f"--learner.steps={STEPS}")
    second.wait_for("continues in")
    second.wait_step(reached + 1)
    family = [process.pid for process in psutil.Process(second.process.pid).children(recursive=True)]
    assert len(family) > len(SERVICES), "the services and Redis"
    second.process.kill()
    second.process.wait(10)

    third = start_mesh(*SHORT, f"--learner.steps={STEPS}")
    third.wait_for("continues in")
    third.wait_step(reached + 1)
    assert survivors(family) == set(), "a service outlived its launcher"
    assert third.finish(120) == 0, third.tail()
    audit(third)
    assert third.summary()["steps"] == STEPS
