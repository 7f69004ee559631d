"""The models of a run by role, each configuration read and counted once."""

from __future__ import annotations

from functools import cache

import torch
from transformers import PreTrainedConfig

from rollmesh.learner.engines.interface import ACTOR
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.model_config import read_config
from rollmesh.planning.architecture import build_on_meta, read_shape
from rollmesh.planning.block_costs import count_block_costs
from rollmesh.planning.megatron.model_sizes import ModelSizes, read_sizes
from rollmesh.planning.shape import BlockCosts, ModelShape


class RunModels:
    """The models that a configuration names; see `plan.Models`.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        self._sections = {ACTOR: config.model}
        self._lora = config.learner.lora
        for role, section in config.learner.roles.items():
            if section.path is not None:
                update = {"path": section.path, "revision": section.revision}
                self._sections[role] = config.model.model_copy(update=update)

    def config(self, role: str) -> PreTrainedConfig:
        """The configuration of a role's model.

        Raises:
            DataError: it cannot be read.
        """
        return _config(*self._key(role))

    def adapter(self, role: str) -> LoraSection | None:
        """The adapter that is trained instead of a role's model."""
        return self._lora if role == ACTOR else None

    def shape(self, role: str) -> ModelShape:
        """The sizes of a role's model.

        Raises:
            ConfigError: there are no layers for its adapter.
            DataError: it cannot be read, or is no causal language model.
        """
        return _shape(*self._key(role), self.adapter(role))

    def costs(self, role: str, dtype: str, sp: int) -> tuple[BlockCosts, ...]:
        """The costs of its blocks in a compute dtype, for the tokens of one of `sp` processes that divide them.

        Raises:
            ConfigError: the model's sequences cannot be divided.
        """
        return _costs(*self._key(role), dtype, sp, self.adapter(role))

    def sizes(self, role: str) -> ModelSizes:
        """The sizes of a role's model as Megatron's engine divides it.

        Raises:
            ConfigError: the engine does not know such models.
        """
        return _sizes(*self._key(role))

    def _key(self, role: str) -> tuple[str, str | None]:
        section = self._sections.get(role, self._sections[ACTOR])
        return section.path, section.revision


@cache
def _config(path: str, revision: str | None) -> PreTrainedConfig:
    return read_config(path, revision)


@cache
def _shape(path: str, revision: str | None, lora: LoraSection | None) -> ModelShape:
    return read_shape(path, build_on_meta(_config(path, revision), lora))


@cache
def _sizes(path: str, revision: str | None) -> ModelSizes:
    config = _config(path, revision)
    shapes = {name: tuple(value.shape) for name, value in build_on_meta(config).named_parameters()}
    return read_sizes(path, config, shapes)


@cache
def _costs(path: str, revision: str | None, dtype: str, sp: int, lora: LoraSection | None) -> tuple[BlockCosts, ...]:
    return count_block_costs(_config(path, revision), getattr(torch, dtype), sp, lora)
