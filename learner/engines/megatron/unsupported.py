"""Settings that would be without effect here: they are refused by name.

Some are of other engines alone; others are for models of another kind.
"""

from __future__ import annotations

from typing import Protocol

from rollmesh.mesh.config.learner import AttentionName, MemorySection, OptimizerSection
from rollmesh.mesh.errors import ConfigError


class Settings(Protocol):
    """The settings that all roles share, as in `learner` and as in an engine's specification."""

    @property
    def attention(self) -> AttentionName:
        """Kernel of packed attention."""

    @property
    def compile(self) -> bool:
        """Layers are compiled."""

    @property
    def memory(self) -> MemorySection:
        """Switches between memory and time."""


def check_settings(settings: Settings, role: str = "this role") -> None:
    """Refuses settings of all roles that this engine does not have.

    Args:
        settings: of the learner.
        role: that has this engine, as an error calls it.

    Raises:
        ConfigError: names the key.
    """
    if settings.attention != "auto":
        _refuse("learner.attention", settings.attention, "auto", role)
    if settings.compile:
        _refuse("learner.compile", "true", "false", role)
    if settings.memory.offload_activations:
        _refuse("learner.memory.offload_activations", "true", "false", role)


def check_optimizer(optimizer: OptimizerSection, key: str = "learner.optimizer", role: str = "this role") -> None:
    """Refuses an optimizer, or a form of its state, that this engine does not have.

    Args:
        optimizer: of a role.
        key: of the configuration that holds it.
        role: as an error calls it.

    Raises:
        ConfigError: names the key.
    """
    if optimizer.name != "adamw":
        _refuse(f"{key}.name", optimizer.name, "adamw", role)
    if optimizer.state_dtype != "float32":
        _refuse(f"{key}.state_dtype", optimizer.state_dtype, "float32", role)


def _refuse(key: str, value: str, works: str, role: str) -> None:
    raise ConfigError(
        f"{key}: {value} is for engine fsdp2, and {role} has engine megatron",
        hint=f"set {key}: {works}, or give {role} engine fsdp2",
    )
