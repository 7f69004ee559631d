"""From the configuration to the learner's algorithm and engine."""

from __future__ import annotations

from typing import Literal

import torch

from learner.algorithms.base import Algorithm
from learner.algorithms.load import load_algorithm
from learner.algorithms.settings import SettingsError
from learner.algorithms.types import UpdatePlan
from learner.engines.base import Engine, EngineSpec
from learner.engines.registry import create_engine
from mesh.config.models import Config
from mesh.errors import ConfigError


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm of a run.

    Raises:
        ConfigError: unknown name or setting, or a run that corrects for nothing although its data can be stale.
    """
    plan = UpdatePlan(
        minibatches=config.learner.batch.minibatches,
        epochs=config.learner.batch.epochs,
        max_staleness=config.buffer.max_staleness,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    try:
        return load_algorithm(config.algorithm.name, config.algorithm.params, plan)
    except SettingsError as error:
        raise ConfigError(str(error), hint=error.hint) from error


def build_engine(config: Config) -> Engine:
    """The engine of this rank; collective under torchrun.

    Raises:
        ConfigError: no such engine, or CUDA was asked for and is absent.
        DataError: the model cannot be loaded.
    """
    batch = config.learner.batch
    spec = EngineSpec(
        model=config.model,
        optimizer=config.learner.optimizer,
        total_steps=config.learner.steps * batch.minibatches * batch.epochs,
        device=_device(config.learner.device),
        param_dtype=config.learner.param_dtype,
        activation_checkpointing=config.learner.activation_checkpointing,
        seed=config.run.seed,
    )
    return create_engine(spec, backend=config.learner.engine)


def _device(wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("learner.device is cuda, but torch finds no CUDA device", hint="set learner.device: cpu")
    return "cuda" if available and wanted != "cpu" else "cpu"
