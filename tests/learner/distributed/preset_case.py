"""Every preset on one batch with the engines of a layout, and roles on engines of their own; called on every rank.

The policy that has sampled the batch is close to the actor, so that clips and trust regions let some tokens pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.registry import ALGORITHMS
from rollmesh.learner.algorithms.types import UpdatePlan
from rollmesh.learner.builders import build_algorithm, build_engines
from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.mesh.config import load_config
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.testing.engine_cases import make_spec
from rollmesh.testing.worlds import Harness
from tests.learner.dataflow import OPTIMIZER, VERSION, make_groups, make_plan, make_worker, weights

Outcome = tuple[dict[str, float], dict[str, dict[str, torch.Tensor]]]
"""Metrics of a batch, and of the policy's log-probs; afterwards the weights of each trained role (in the leader)."""
_TOKEN_BUDGET = 48
_PLAN = UpdatePlan(minibatches=2, max_staleness=VERSION, max_response_tokens=9, group_size=3, steps=10)
_SETTINGS: dict[str, dict[str, Any]] = {"vapo": {"critic_warmup": 0}}
# By role: kind, whether it is trained.
_ROLES = {
    "critic": ("value_model", True),
    "prm": ("language_model", True),
    "reference": ("language_model", False),
    "teacher": ("language_model", False),
}


def presets() -> Iterator[tuple[str, Algorithm]]:
    """All presets by name."""
    for name in ALGORITHMS.names:
        algorithm = load_algorithm(name, _SETTINGS.get(name, {}), _PLAN)
        if type(algorithm).__module__.endswith("presets"):
            yield name, algorithm


def sample_groups(model: Path) -> list[SampledGroup]:
    """Groups with rewards around 0 and 1, sampled by a policy near the model's, with a greedy baseline each."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False).eval()
    rng = np.random.default_rng(5)
    groups = make_groups(groups=4)
    for group in groups:
        for member in group.members:
            member.meta.reward = rng.integers(2) + 0.1 * rng.random()
    return [
        replace(
            group,
            baseline_reward=0.5,
            members=[
                replace(member, trajectory=_sampled_by(policy, group.prompt_ids, member.trajectory, rng))
                for member in group.members
            ],
        )
        for group in groups
    ]


@torch.no_grad()
def _sampled_by(policy: Any, prompt: Any, found: Trajectory | None, rng: np.random.Generator) -> Trajectory | None:
    if found is None:
        return None
    ids = torch.from_numpy(np.concatenate([prompt, found.response_ids])).long()
    every = policy(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    chosen = every.gather(1, ids[len(prompt) :, None])[:, 0].numpy()
    noisy = (chosen + rng.normal(0.0, 0.1, len(chosen))).astype(np.float32)
    return replace(found, log_probs=np.where(found.response_mask.astype(bool), noisy, np.float32(0.0)))


def train_presets(
    harness: Harness,
    models: Mapping[str, Path],
    groups: Sequence[SampledGroup],
    folder: Path,
    names: Sequence[str] | None = None,
) -> dict[str, Outcome]:
    """Trains one batch of presets, each from the same weights.

    Args:
        harness: of the layout.
        models: folder of each role's model.
        groups: the batch.
        folder: for the first checkpoints.
        names: of the presets; None: all.
    """
    kinds = {ACTOR: ("language_model", True)} | _ROLES
    engines: dict[str, Engine] = {
        role: harness.make(make_spec(models[role], optimizer=OPTIMIZER if trained else None), kind)
        for role, (kind, trained) in kinds.items()
    }
    for role, engine in engines.items():
        if engine.trained:
            engine.begin_checkpoint(folder / role, {}).result(240)
            engine.world.barrier()
    found = {}
    for name, algorithm in presets():
        if names is not None and name not in names:
            continue
        used = {ACTOR: engines[ACTOR]} | {role.name: engines[role.name] for role in algorithm.needs.roles}
        for role, engine in used.items():
            if engine.trained:
                engine.load_checkpoint(folder / role)
        found[name] = _train_batch(algorithm, used, groups, folder)
    return found


def train_roles(
    _harness: Harness, model: Path, groups: Sequence[SampledGroup], folder: Path, settings: Sequence[str]
) -> Outcome:
    """Trains one batch of PPO with a reference policy, with the engines that a configuration gives the roles."""
    config = load_config(
        {"model": {"path": str(model), "dtype": "float32"}, "data": {"train": "unused"}},
        [
            "algorithm={name: ppo, kl: {where: loss, coefficient: 0.1}}",
            "learner.device=cpu",
            "learner.optimizer={lr: 1e-2, eps: 1e-2, max_grad_norm: 1e9}",
            "rollout={max_prompt_tokens: 8, max_response_tokens: 9}",
            *settings,
        ],
    )
    algorithm = build_algorithm(config)
    engines = build_engines(config, algorithm)
    try:
        return _train_batch(algorithm, engines, groups, folder)
    finally:
        for engine in engines.values():
            engine.close()


def _train_batch(
    algorithm: Algorithm, engines: Mapping[str, Engine], groups: Sequence[SampledGroup], folder: Path
) -> Outcome:
    worker = make_worker(algorithm, engines, groups, folder, token_budget=_TOKEN_BUDGET)
    plan = make_plan(groups, token_budget=_TOKEN_BUDGET, minibatches=2, dp_sizes=worker.dp_sizes)
    assert not worker.prepare(plan)
    result = worker.train(lambda: None)
    assert result.tokens is not None
    known = result.tokens.policy_log_probs
    assert known is not None
    unknown = float(known.isnan().sum())
    metrics = result.metrics | {"policy_log_probs/sum": float(known.nansum()), "policy_log_probs/unknown": unknown}
    return metrics, {role: weights(engine) for role, engine in engines.items() if engine.trained}
