"""Requirements of an algorithm that the configuration must provide: a missing one is refused at start, by name."""

from __future__ import annotations

from collections.abc import Iterable

from rollmesh.learner.algorithms.types import ModelRole, Needs
from rollmesh.mesh.config.learner import RoleSection
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.config.scorers.parts import part_names
from rollmesh.mesh.errors import ConfigError


def check_needs(config: Config, needs: Needs) -> None:
    """Checks that a run can provide all data that its algorithm needs.

    Raises:
        ConfigError: names the setting that contradicts.
    """
    name = config.algorithm.name
    members, _ = config.group_sizes
    if members < needs.group_size:
        small = [source.label for source in config.data.train if source.sampling.n == members]
        key = f"sampling.n of the source {small[0]}" if small else "rollout.n"
        raise ConfigError(
            f"algorithm {name} compares the responses of a group and needs at least {needs.group_size}, but {key} "
            f"is {members}",
            hint=f"set {key} to {needs.group_size} or more",
        )
    roles = {role.name: role for role in needs.roles}
    for section in config.learner.roles:
        if section not in roles:
            raise ConfigError(
                f"learner.roles.{section}: algorithm {name} has no such role",
                hint=f"its roles: {', '.join(roles) or 'only the actor, which is `model`'}",
            )
        if config.learner.roles[section].optimizer is not None and not roles[section].trained:
            raise ConfigError(
                f"learner.roles.{section}.optimizer: algorithm {name} does not train this role",
                hint="leave the optimizer out",
            )
        if config.learner.roles[section].offload and roles[section].trained:
            raise ConfigError(
                f"learner.roles.{section}.offload: algorithm {name} trains this role in every step",
                hint="leave it out; for such roles use learner.memory.offload_params and related keys",
            )
    known = _component_names(config.reward)
    for component in needs.components:
        if known is not None and component.partition("/")[0] not in known:
            raise ConfigError(
                f"algorithm {name} needs the reward component {component!r}, but no function of reward.functions "
                "has this name",
                hint=f"components: {', '.join(sorted(known))}, and the parts they report as function/part",
            )


def base_roles(config: Config, roles: Iterable[ModelRole]) -> frozenset[str]:
    """The roles that need no engine: their model is the actor's without its adapter, as long as nothing says otherwise.

    Args:
        config: of the run.
        roles: of the algorithm.
    """
    if config.learner.lora is None:
        return frozenset()
    return frozenset(
        role.name
        for role in roles
        if not role.trained
        and role.kind == "language_model"
        and config.learner.roles.get(role.name, RoleSection()) == RoleSection()
    )


def _component_names(reward: RewardSection) -> set[str] | None:
    """Names of the reward functions; None where components may have other names, which show with the first group.

    A single function's parts have names of its own, and so have those of other hosts' services.
    """
    if len(reward.functions) < 2 or reward.endpoints or reward.by_data_source:
        return None
    return set(part_names(reward.functions))
