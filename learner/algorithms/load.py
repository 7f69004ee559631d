"""From the name and settings in a configuration to an algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from learner.algorithms import ppo  # noqa: F401 - entering the registry
from learner.algorithms.base import Algorithm
from learner.algorithms.registry import ALGORITHMS
from learner.algorithms.settings import SettingsError, parse
from learner.algorithms.types import GlobalCounts, TokenBatch, UpdatePlan


def load_algorithm(name: str, params: Mapping[str, Any], plan: UpdatePlan) -> Algorithm:
    """Builds an algorithm and tries its loss on one token, so that bad settings show before the run starts.

    Args:
        name: registered name, `package.module:Class` or `file.py:Class`.
        params: its settings.
        plan: what the run does with each batch.

    Raises:
        SettingsError: unknown name or setting, value out of range, contradiction with the plan.
    """
    algorithm_type = ALGORITHMS.get(name, "algorithm.name")
    if not (isinstance(algorithm_type, type) and issubclass(algorithm_type, Algorithm)):
        raise SettingsError("algorithm.name", f"{name!r} is not a subclass of learner.algorithms.base.Algorithm")
    try:
        algorithm = algorithm_type(parse(algorithm_type.settings_type, params), plan)
        log_probs = torch.full((1,), -1.0, requires_grad=True)
        algorithm.loss(log_probs, torch.zeros(1), TokenBatch.one_token(), GlobalCounts(1, 1))
    except SettingsError as error:
        if error.field.startswith("algorithm."):
            raise
        raise SettingsError(f"algorithm.params.{error.field}", error.message, hint=error.hint) from error
    return algorithm
