"""Settings on which the learner and a role's processes must agree, and how much a batch may take."""

from __future__ import annotations

import json

from rollmesh.learner.algorithms.types import ModelRole
from rollmesh.mesh.config import Config

# All tensors of a token together, also those that an algorithm adds by name.
_TOKEN_BYTES = 256


def agreed_settings(config: Config, role: ModelRole) -> dict[str, str]:
    """The settings of a run that a role's loss and optimizer depend on, as JSON by key.

    A role that is not trained depends on none of them, and its folder may have another path on each machine.
    """
    if not role.trained:
        return {}
    learner = config.learner
    own = learner.roles.get(role.name)
    optimizer = (own and own.optimizer) or learner.optimizer
    values = {
        "algorithm": config.algorithm.model_dump(mode="json"),
        "buffer.max_staleness": config.buffer.max_staleness,
        "learner.batch.epochs": learner.batch.epochs,
        "learner.batch.minibatches": learner.batch.minibatches,
        "learner.steps": learner.steps,
        "optimizer": optimizer.model_dump(mode="json"),
        "rollout.max_response_tokens": config.rollout.max_response_tokens,
        "rollout.n": config.group_sizes,
        "run.seed": config.run.seed,
    }
    return {key: json.dumps(value, sort_keys=True) for key, value in values.items()}


def most_batch_bytes(config: Config) -> int:
    """Bytes that the tensors of a batch may have at most."""
    rollout = config.rollout
    _, members = config.group_sizes
    sequences = config.learner.batch.groups * (members + 1)
    return sequences * (rollout.max_prompt_tokens + rollout.max_response_tokens + 1) * _TOKEN_BYTES
