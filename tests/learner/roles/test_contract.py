"""The contract of roles elsewhere: whatever serves a model, it is trained and asked as in the learner's processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollmesh.learner.distributed.worker import TrainResult, Worker
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.roles.remote_role import RemoteRole
from rollmesh.mesh.errors import DataError, FencedError, RoleLostError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.learner.dataflow import OPTIMIZER, VERSION, Probe, make_groups, make_plan, make_worker, train_probe, weights
from tests.learner.engines.models import make_model, make_spec
from tests.learner.roles.serving import Served, builder, remote_roles, serve_role

ROLES = {role.name: role for role in Probe().needs.roles}
BUDGET = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def one_world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TrainResult]:
    seen, result, worker, *_ = train_probe(model, tmp_path_factory.mktemp("one"), token_budget=1 << 20)
    worker.close()
    return seen, result


@pytest.fixture
def bridge() -> Iterator[AsyncBridge]:
    found = AsyncBridge()
    yield found
    found.close()


class Learner:
    """A learner of the probe whose other roles are elsewhere."""

    def __init__(self, model: Path, folder: Path, served: dict[str, Served], bridge: AsyncBridge) -> None:
        self.algorithm, groups = Probe(), make_groups()
        self.actor = create_engine(make_spec(model, optimizer=OPTIMIZER))
        self.roles = remote_roles(
            list(ROLES.values()),
            self.algorithm,
            self.actor.world,
            lambda: [role.address for role in served.values()],
            bridge,
        )
        self.worker: Worker = make_worker(
            self.algorithm, {"actor": self.actor}, groups, folder, epochs=2, token_budget=BUDGET, elsewhere=self.roles
        )
        self.plan = make_plan(groups, token_budget=BUDGET, minibatches=2)

    def train(self) -> TrainResult:
        """One batch."""
        assert self.worker.prepare(self.plan) == {}
        return self.worker.train(lambda: None)


@pytest.fixture
def served(model: Path) -> Iterator[dict[str, Served]]:
    """Critic, reference and scorer, each served apart."""
    with ExitStack() as closers:
        yield {
            name: closers.enter_context(serve_role(role, Probe(), builder(model, role), token_budget=30))
            for name, role in ROLES.items()
        }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_roles_elsewhere_change_nothing(
    model: Path, served: dict[str, Served], bridge: AsyncBridge, tmp_path: Path, one_world: Any
) -> None:
    learner = Learner(model, tmp_path, served, bridge)
    learner.worker.attach_roles(1)
    result = learner.train()
    expected, before = one_world
    assert_same(weights(learner.actor), expected["actor"])
    for name in ("critic", "scorer"):
        assert_same(weights(served[name].worker.engine), expected[name])
    assert {k: v for k, v in result.metrics.items() if not k.startswith("probe/")} == pytest.approx(
        {k: v for k, v in before.metrics.items() if not k.startswith("probe/")}, rel=1e-3, abs=1e-5
    )
    learner.worker.close()


def test_a_checkpoint_holds_roles_elsewhere_and_a_new_learner_continues_from_it(
    model: Path, served: dict[str, Served], bridge: AsyncBridge, tmp_path: Path
) -> None:
    first = Learner(model, tmp_path, served, bridge)
    first.worker.attach_roles(1)
    first.train()
    folder = first.worker.begin_checkpoint(PolicyVersion(1, VERSION + 1), {}).result(60)
    saved = {name: weights(served[name].worker.engine) for name in ("critic", "scorer")}
    first.train()
    changed = weights(served["critic"].worker.engine)
    assert any(not torch.equal(changed[name], saved["critic"][name]) for name in changed)
    second = Learner(model, tmp_path, served, bridge)
    second.worker.load(folder)
    second.worker.attach_roles(2)
    for name, before in saved.items():
        assert_same(weights(served[name].worker.engine), before)
    # The first one is superseded, and changes nothing any more.
    with pytest.raises(FencedError):
        first.train()
    for name, before in saved.items():
        assert_same(weights(served[name].worker.engine), before)
    first.worker.close()
    second.worker.close()


def test_a_learner_without_a_checkpoint_gets_the_initial_model(
    model: Path, served: dict[str, Served], bridge: AsyncBridge, tmp_path: Path, one_world: Any
) -> None:
    first = Learner(model, tmp_path, served, bridge)
    first.worker.attach_roles(1)
    first.train()
    second = Learner(model, tmp_path, served, bridge)
    second.worker.attach_roles(2)
    second.train()
    assert_same(weights(served["critic"].worker.engine), one_world[0]["critic"])
    first.worker.close()
    second.worker.close()
