"""Requirements of a start that need neither data nor a mesh: a run that lacks one is refused before anything starts."""

from __future__ import annotations

import math

import torch

from rollmesh.learner.checkpoint.remote_copies import check_file_system
from rollmesh.learner.distributed.step_profiler import check_snapshots
from rollmesh.learner.engines.registry import check_backend
from rollmesh.learner.layout_requirements import check_layout
from rollmesh.mesh.config.learner import LearnerSection, OptimizerSection
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.runtime.devices import DeviceType

# Stands in proposals and in documentation for an address that only the user knows.
_PLACEHOLDER = "HOST"


def check_start(config: Config, *, elsewhere: bool = False) -> None:
    """Checks what no device is needed for.

    Args:
        config: of the run.
        elsewhere: the learner will have another interpreter than this one, which has other packages.

    Raises:
        ConfigError: names the setting.
        DataError: a model's folder has no configuration.
    """
    learner = config.learner
    if not elsewhere:
        check_backend(learner.engine)
        for name, role in learner.roles.items():
            # Other machines have other packages.
            if role.engine is not None and role.at != "elsewhere":
                check_backend(role.engine, f"learner.roles.{name}.engine")
    check_layout(config)
    if (learner.distributed.rendezvous or "").startswith(f"{_PLACEHOLDER}:"):
        raise ConfigError(
            f"learner.distributed.rendezvous is {learner.distributed.rendezvous}, which is no address",
            hint=f"put the address of node 0 in place of {_PLACEHOLDER}",
        )
    check_schedules(learner, learner.steps)
    if config.checkpoint.copy_to is not None:
        check_file_system(config.checkpoint.copy_to)


def check_device(config: Config, device: DeviceType) -> None:
    """Checks what depends on the learner's device.

    Args:
        config: of the run.
        device: on which it computes.

    Raises:
        ConfigError: names the setting.
    """
    learner = config.learner
    check_snapshots(learner.profile, device)
    if "fsdp2" in learner.engines and learner.attention != "auto":
        from rollmesh.learner.engines.fsdp2.kernels.choice import choose_kernel

        dtype, _ = learner.compute_on(device)
        choose_kernel(learner.attention, torch.device(device), getattr(torch, dtype))


def check_schedules(learner: LearnerSection, steps: int) -> None:
    """Refuses schedules of a run's roles that it has no room for; see `check_schedule`."""
    check_schedule("learner.optimizer", learner.optimizer, steps)
    for name, role in learner.roles.items():
        if role.optimizer is not None:
            check_schedule(f"learner.roles.{name}.optimizer", role.optimizer, steps)


def check_schedule(key: str, section: OptimizerSection, steps: int) -> None:
    """Refuses a warm-up and a decay that a run has no room for.

    Raises:
        ConfigError: names the setting.
    """
    if section.schedule != "wsd":
        return
    warmup = section.warmup_steps or round(section.warmup_ratio * steps)
    decay = math.ceil(section.decay_ratio * steps)
    if warmup + decay > max(steps, 1):
        raise ConfigError(
            f"{key}: a warm-up of {warmup} and a decay of {decay} steps, and the run has {steps}",
            hint=f"lower {key}.decay_ratio or the warm-up",
        )
