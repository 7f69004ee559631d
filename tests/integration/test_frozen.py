"""Services of a real run that stop answering: each is killed, comes back, and the run trains on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.integration.mesh import MeshRun, alive, audit

# A coroutine runs in the service itself, whatever becomes of functions that are none.
REWARD = """
from pathlib import Path

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    try:
        Path({flag!r}).unlink()
    except FileNotFoundError:
        return float(solution_str.strip() == str(ground_truth))
    return float(3 ** (10 ** 10))
"""
BOUND_S = 4.0


def frozen(run: MeshRun, service: str, seen: str) -> None:
    """Waits until a service was found frozen, is back, and a step was trained after that."""
    run.wait_for(rf"{service}: frozen \({seen}.*, killed; restarting")
    run.wait_for(rf"{service} is back")
    run.wait_for(r"step \d+: reward")


def tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_service_that_freezes_is_killed_and_the_run_trains_on(start_mesh, tmp_path: Path) -> None:
    """A scorer that never lets go of the interpreter; a stopped learner, generator, and front with its Redis."""
    flag, function = tmp_path / "freeze", tmp_path / "rewards.py"
    function.write_text(REWARD.format(flag=str(flag)))
    run = start_mesh(
        *("--rollout.replicas=1", "--buffer.lease_s=4", "--buffer.reconnect_grace_s=0.5", "--checkpoint.every_s=2"),
        *(f"--reward.functions=[{function}:compute_score]", "--eval.every_steps=100000", "--learner.steps=100000"),
        *(f"--resources.frozen_after_s={BOUND_S}", "--network.retry_s=90"),
    )
    run.wait_step(3)
    flag.touch()
    frozen(run, "reward", r"ran for \d+ s of processor time")
    for service in ("learner", "generator-0"):
        os.kill(run.pid(service), signal.SIGSTOP)
        frozen(run, service, r"stopped by a signal")
    front = tree(run.pid("buffer"))
    assert len(front) > 1, "Redis is below the front"
    for process in front:
        process.suspend()
    frozen(run, "buffer", r"stopped by a signal")
    assert [process for process in front if alive(process.pid)] == []

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
