"""kill -9 of each service in the middle of a run, of all of them at once, and an orderly Ctrl-C."""

import signal

import pytest

from tests.integration.mesh import alive, audit

SHORT = ("--rollout.replicas=2", "--buffer.lease_s=4", "--buffer.reconnect_grace_s=0.5", "--checkpoint.every_steps=7")
SERVICES = ("buffer", "reward", "generator-0", "generator-1", "learner")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_service_is_killed_in_turn_and_nothing_is_lost_or_doubled(start_mesh) -> None:
    run = start_mesh(*SHORT, "--learner.steps=100000")
    run.wait_step(5)
    for service in ("generator-0", "reward", "buffer", "learner"):
        before = run.pid(service)
        run.kill9(service)
        run.wait_for(rf"{service} is back")
        assert run.pid(service) != before
        run.wait_for(r"step \d+: reward")
    run.wait_step(max(run.last_step(), 8) + 8)
    run.process.send_signal(signal.SIGINT)
    assert run.finish(120) == 130, run.tail()
    audit(run)


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


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ctrl_c_drains_and_a_second_start_finishes(start_mesh) -> None:
    first = start_mesh(*SHORT, "--learner.steps=40")
    first.wait_step(9)
    pids = [first.pid(service) for service in SERVICES]
    first.process.send_signal(signal.SIGINT)
    assert first.finish(60) == 130, first.tail()
    assert [pid for pid in pids if alive(pid)] == []
    second = start_mesh(*SHORT, "--learner.steps=40")
    assert second.finish(120) == 0, second.tail()
    audit(second)
