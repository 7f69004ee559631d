"""The contract of roles elsewhere: whatever serves a model, it is trained and asked as in the learner's processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollmesh.learner.distributed.worker import TrainResult, Worker
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.roles.client import RoleLimits
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.mesh.errors import ConfigError, DataError, FencedError, RoleLostError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.testing.engine_cases import assert_same
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout
from tests.learner.dataflow import OPTIMIZER, VERSION, Probe, make_groups, make_plan, make_worker, train_probe, weights
from tests.learner.engines.models import make_model, make_spec
from tests.learner.roles.serving import (
    LIMITS,
    Served,
    builder,
    remote_roles,
    role_on_ranks,
    serve_role,
    train_on_ranks,
)

ROLES = {role.name: role for role in Probe().needs.roles}
BUDGET = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", num_hidden_layers=1)


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

    def __init__(
        self,
        model: Path,
        folder: Path,
        served: Mapping[str, Any],
        bridge: AsyncBridge,
        limits: RoleLimits = LIMITS,
    ) -> None:
        self.algorithm, groups = Probe(), make_groups()
        self.actor = create_engine(make_spec(model, optimizer=OPTIMIZER))
        self.roles = remote_roles(
            list(ROLES.values()),
            self.algorithm,
            self.actor.world,
            lambda: [role.address for role in served.values()],
            bridge,
            limits,
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


def assert_same_metrics(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


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
    assert_same_metrics(result.metrics, before.metrics)
    learner.worker.close()


def test_a_checkpoint_holds_roles_elsewhere_and_a_new_learner_continues_from_it(
    model: Path, served: dict[str, Served], bridge: AsyncBridge, tmp_path: Path
) -> None:
    first = Learner(model, tmp_path, served, bridge)
    first.worker.attach_roles(1)
    first.train()
    folder = first.worker.begin_checkpoint(PolicyVersion(1, VERSION + 1), {}).result(240)
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


def test_a_learner_of_several_ranks_has_roles_elsewhere(
    model: Path, served: dict[str, Served], engine_worlds: GetWorld, tmp_path: Path, one_world: Any
) -> None:
    addresses = [role.address for role in served.values()]
    ranks = engine_worlds(EngineLayout("two_ranks", processes=2)).run(train_on_ranks, model, tmp_path, addresses)
    expected, before = one_world
    assert_same(ranks[0]["actor"], expected["actor"])
    for found in ranks:
        # Rank 1 comes to other results in its stages.
        assert found["metrics"].pop("ranks/differing") > 0
        assert_same_metrics(found["metrics"], before.metrics)
        assert {"critic", "scorer"} <= {*found["saved"]}
    for name in ("critic", "scorer"):
        assert_same(weights(served[name].worker.engine), expected[name])


LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "critic over two processes, reference and scorer in one": {"critic": {}},
    "scorer as two copies": {"scorer": {"parallel": ParallelSection(shards=1)}},
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.exhaustive] * case.startswith("scorer")) for case in LAYOUTS]
)
def test_roles_have_layouts_of_their_own(
    case: str, model: Path, bridge: AsyncBridge, engine_worlds: GetWorld, tmp_path: Path, one_world: Any
) -> None:
    ((divided, changes),) = LAYOUTS[case].items()
    (tmp_path / "role").mkdir()
    with ExitStack() as closers:
        address, finish = closers.enter_context(
            role_on_ranks(
                engine_worlds(EngineLayout("two_ranks", processes=2)), tmp_path / "role", model, ROLES[divided], changes
            )
        )
        served = {
            name: closers.enter_context(serve_role(role, Probe(), builder(model, role), token_budget=30))
            for name, role in ROLES.items()
            if name != divided
        }
        learner = Learner(model, tmp_path / "run", {**served, divided: SimpleNamespace(address=address)}, bridge)
        learner.worker.attach_roles(1)
        result = learner.train()
        assert_same(weights(learner.actor), one_world[0]["actor"])
        assert_same_metrics(result.metrics, one_world[1].metrics)
        learner.worker.close()
        assert_same(finish(), one_world[0][divided])


def test_an_untrained_role_that_starts_again_amid_a_batch_gets_the_batch_again(
    model: Path, served: dict[str, Served], bridge: AsyncBridge, tmp_path: Path, one_world: Any
) -> None:
    learner = Learner(model, tmp_path, served, bridge)
    learner.worker.attach_roles(1)
    learner.worker.prepare(learner.plan)
    # It has served the session, and what comes in its place has not.
    with serve_role(ROLES["reference"], Probe(), builder(model, ROLES["reference"])) as another:
        served["reference"].stop()
        served["reference"] = another
        learner.worker.train(lambda: None)
        assert_same(weights(learner.actor), one_world[0]["actor"])
        learner.worker.close()


def test_a_trained_role_that_starts_again_is_lost_and_its_learner_says_so_at_once(
    model: Path, served: dict[str, Served], bridge: AsyncBridge, tmp_path: Path
) -> None:
    learner = Learner(model, tmp_path, served, bridge)
    learner.worker.attach_roles(1)
    learner.worker.prepare(learner.plan)
    with serve_role(ROLES["critic"], Probe(), builder(model, ROLES["critic"])) as another:
        served["critic"].stop()
        served["critic"] = another
        with pytest.raises(RoleLostError, match="role critic"):
            learner.worker.train(lambda: None)
        learner.worker.close()


def test_a_role_that_stays_away_is_named(model: Path, bridge: AsyncBridge, tmp_path: Path) -> None:
    learner = Learner(model, tmp_path, {}, bridge, RoleLimits(silence_s=1.0, away_s=1.0, call_s=2.0))
    with pytest.raises(
        RoleLostError, match=r"role critic has not answered for 1 s: no process serves it .*rollmesh role"
    ):
        learner.worker.attach_roles(1)
    learner.worker.close()


def test_a_checkpoint_that_the_role_cannot_see_is_named(
    model: Path, served: dict[str, Served], bridge: AsyncBridge, tmp_path: Path
) -> None:
    learner = Learner(model, tmp_path, served, bridge)
    learner.roles["critic"].load_checkpoint(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"role critic cannot use .*elsewhere.*resume where"):
        learner.worker.attach_roles(1)
    learner.worker.close()


def test_a_loss_that_the_role_cannot_find_is_refused(
    model: Path, served: dict[str, Served], bridge: AsyncBridge, tmp_path: Path
) -> None:
    learner = Learner(model, tmp_path, served, bridge)
    with pytest.raises(ConfigError, match=r"the loss of role critic is no public method.*at: learner"):
        learner.roles["critic"].loss_name(lambda *_: None)  # type: ignore[arg-type]  # any other function
    learner.worker.close()
