"""The demonstration's model with a real engine, whose server or workers the generator starts, and a reward that it
learns in a few steps.

The launcher and all other services run in the environment of this test, the generator where its section says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rollmesh.mesh.liveness.process_ends import survivors
from tests import engines_here
from tests.integration import sevens
from tests.integration.mesh import MeshRun, audit
from tests.integration.poisoning import audit_poisoned, environment, interpreter
from tests.sockets import assert_on_loopback, listeners, ports
from tests.strangers import audit_privacy

# With the engine hf and three seeds the share of sevens went from 0.02 .. 0.10 to 0.70 .. 0.74.
_STEPS, _GROUPS = 8, 16
OPTIONS = {
    "vllm": lambda folder: (f"--rollout.python={interpreter(engines_here.python('vllm'), folder)}",),
    "sglang": lambda folder: (f"--rollout.sglang.python={interpreter(engines_here.python('sglang'), folder)}",),
}


# SGLang's processes end, listen and outlive poison in tests/generators/engines/sglang too.
_TIERS = {"vllm": (), "sglang": (pytest.mark.exhaustive,)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=(pytest.mark.engine(name), *tier)) for name, tier in _TIERS.items()]
)
def test_an_engine_samples_what_is_rewarded(
    start_mesh: Callable[..., MeshRun], demo_data: Path, tmp_path: Path, engine: str
) -> None:
    """Though a process of the engine raises at one of the prompts."""
    run = start_mesh(
        f"--rollout.engine={engine}",
        *OPTIONS[engine](tmp_path),
        f"--reward.functions=['{sevens.__file__}:score']",
        "--rollout.replicas=1",
        "--rollout.endpoint.enabled=true",
        "--learner.optimizer.lr=1.2e-3",
        "--learner.optimizer.schedule=constant",
        "--learner.optimizer.warmup_steps=0",
        f"--learner.batch.groups={_GROUPS}",
        # Each token is a step of the engine.
        "--rollout.max_response_tokens=3",
        f"--learner.steps={_STEPS}",
        f"--eval.every_steps={_STEPS}",
        "--eval.stop_at=null",
        env=environment(demo_data),
    )
    run.wait_step(1)
    family = [process.pid for process in psutil.Process(run.pid("generator-0")).children(recursive=True)]
    assert family, "the engine has processes of its own"
    assert_on_loopback(listeners(run.process.pid), with_ports=ports(run.doors()))
    audit_privacy(run.folder, run.process.pid)
    assert run.finish() == 0, run.tail()
    # A process that only watches over shared memory ends by itself once the others have.
    assert survivors(family, 30.0) == set(), "a process of the engine outlived its generator"
    audit(run)
    audit_poisoned(run, demo_data)
    assert run.summary()["steps"] == _STEPS
    first, last = run.trend("critic/score/mean")
    assert last > 0.35 > first, (first, last)
