"""What the launcher does about deaths: services are started again, a dead launcher's run goes on, Ctrl-C drains.

What faults do to the mesh itself, each service alone and together: tests/faults.
"""

import signal

import pytest

from tests.integration.mesh import alive, audit

SHORT = ("--rollout.replicas=2", "--buffer.lease_s=4", "--buffer.reconnect_grace_s=0.5", "--checkpoint.every_steps=7")
SERVICES = ("buffer", "reward", "generator-0", "generator-1", "learner")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_services_come_back_ctrl_c_drains_and_a_second_start_finishes(start_mesh) -> None:
    first = start_mesh(*SHORT, "--learner.steps=80")
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
    assert [pid for pid in pids if alive(pid)] == []
    second = start_mesh(*SHORT, "--learner.steps=80")
    assert second.finish(120) == 0, second.tail()
    audit(second)
    assert second.summary()["steps"] == 80


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_all_at_once_dies_with_the_launcher_and_a_second_start_goes_on(start_mesh) -> None:
    first = start_mesh(*SHORT, "--learner.steps=40")
    first.wait_step(16)
    pids = [first.pid(service) for service in SERVICES]
    first.process.kill()
    first.process.wait(10)
    second = start_mesh(*SHORT, "--learner.steps=40")
    second.wait_for("going on")
    second.wait_step(17)
    assert [pid for pid in pids if alive(pid)] == [], "a service outlived its launcher"
    assert second.finish(120) == 0, second.tail()
    audit(second)
    assert second.summary()["steps"] == 40
