"""PPO with a reference policy and a teacher: four models, and what an algorithm sees of each. Also one of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rollmesh.learner.algorithms.interface import Algorithm, Batch
from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.numerics import log_ratio
from rollmesh.learner.algorithms.presets import PPO
from rollmesh.learner.algorithms.settings import Settings
from rollmesh.learner.algorithms.types import Estimate, ModelRole, Needs, UpdatePlan
from rollmesh.learner.distributed.worker import Worker
from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.testing.worlds import Harness
from tests.learner.dataflow import OPTIMIZER, VERSION, make_plan, make_worker, weights
from tests.learner.engines.models import make_spec
from tests.learner.roles.serving import connected_worker

EPOCHS, MINIBATCHES, BATCHES = 2, 2, 2
_SETTINGS = {"kl": {"where": "reward", "coefficient": 0.1}}


class Taught(PPO):
    """The teacher's judgement of each token is added to its advantage."""

    def __init__(self, settings: Settings, plan: UpdatePlan) -> None:
        super().__init__(settings, plan)  # type: ignore[arg-type]  # of its type
        self.seen: list[dict[str, Tensor]] = []

    @property
    def needs(self) -> Needs:
        needs = super().needs
        return Needs(roles=(*needs.roles, ModelRole("teacher")), group_size=needs.group_size)

    def batch_stage(self, batch: Batch) -> None:
        super().batch_stage(batch)
        rollouts = batch.rollouts
        found = {
            "values": rollouts.values,
            "reference": rollouts.reference_log_probs,
            "policy": rollouts.proximal_log_probs,
            "advantages": rollouts.advantages,
            "teacher": rollouts.extra["teacher"],
        }
        self.seen.append({name: values.clone() for name, values in found.items() if values is not None})

    def _estimate_advantages(self, batch: Batch, policy: Tensor) -> Estimate:
        estimate = super()._estimate_advantages(batch, policy)
        teacher, _ = batch.infer("teacher").policy()
        batch.rollouts.extra["teacher"] = teacher
        return Estimate(estimate.advantages + 0.5 * log_ratio(teacher, policy), estimate.returns)


def make_taught() -> Algorithm:
    """The algorithm of every process."""
    plan = UpdatePlan(
        minibatches=MINIBATCHES,
        epochs=EPOCHS,
        max_staleness=VERSION,
        max_response_tokens=9,
        group_size=3,
        steps=BATCHES,
    )
    return load_algorithm(f"{__name__}:Taught", _SETTINGS, plan)


def train_in_one_world(models: Mapping[str, Path], groups: Sequence[SampledGroup], folder: Path) -> dict[str, Any]:
    """All models in this process; gives what was seen, metrics by batch, and the weights of what is trained."""
    algorithm = make_taught()
    engines: dict[str, Engine] = {ACTOR: create_engine(make_spec(models[ACTOR], optimizer=OPTIMIZER))}
    for role in algorithm.needs.roles:
        spec = make_spec(models[role.name], optimizer=OPTIMIZER if role.trained else None)
        engines[role.name] = create_engine(spec, model_type=role.kind)  # type: ignore[arg-type]  # of the two kinds
    worker = make_worker(algorithm, engines, groups, folder, epochs=EPOCHS)
    metrics = _train(worker, groups, token_budget=1 << 20)
    trained = {role: weights(engine) for role, engine in engines.items() if engine.trained}
    worker.close()
    return {"seen": algorithm.seen, "metrics": metrics, **trained}  # type: ignore[attr-defined]  # it is a Taught


def train_as_rank(
    harness: Harness,
    models: Mapping[str, Path],
    groups: Sequence[SampledGroup],
    folder: Path,
    addresses: Sequence[str],
) -> dict[str, Any]:
    """One of the actor's ranks, with all other models elsewhere; gives the same of the actor."""
    del harness  # the worker closes its engine
    algorithm, actor = make_taught(), create_engine(make_spec(models[ACTOR], optimizer=OPTIMIZER))
    with connected_worker(algorithm, actor, groups, folder, addresses, epochs=EPOCHS) as worker:
        metrics = _train(worker, groups, token_budget=40)
        return {"seen": algorithm.seen, "metrics": metrics, ACTOR: weights(actor)}  # type: ignore[attr-defined]


def _train(worker: Worker, groups: Sequence[SampledGroup], *, token_budget: int) -> list[dict[str, float]]:
    """The metrics of the batches, which are the same one each time."""
    found = []
    for _ in range(BATCHES):
        plan = make_plan(groups, token_budget=token_budget, minibatches=MINIBATCHES, dp_sizes=worker.dp_sizes)
        assert worker.prepare(plan) == {}
        found.append(worker.train(lambda: None).metrics)
    return found
