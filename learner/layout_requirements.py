"""Requirements of the layout of ranks: what cannot be divided is refused before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollmesh.learner.engines.experts.layers import expert_count
from rollmesh.learner.engines.fsdp2.parallel_requirements import check_parallel
from rollmesh.learner.engines.interface import ACTOR
from rollmesh.learner.engines.megatron.families.registry import check_model_type
from rollmesh.learner.engines.megatron.requirements import ModelFacts, resolve_sizes
from rollmesh.learner.engines.megatron.unsupported import check_optimizer, check_settings
from rollmesh.learner.model_files.checks import attention_heads, read_model_config
from rollmesh.learner.vision.families import FAMILIES
from rollmesh.learner.vision.roles import check_role
from rollmesh.mesh.config.learner import LearnerSection
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.parallel import MegatronSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.trajectory.images import has_processor

# Keys of `learner.router`.
_ROUTERS_OF_FSDP2 = ("bias_update_rate",)


def check_layout(config: Config) -> None:
    """Checks that each role's engine can divide its model and the ranks as configured.

    Models of a hub are checked later. Settings that an engine does not have are refused too.

    Raises:
        ConfigError: names the setting, and the nearest that works.
        DataError: a model's folder has no configuration.
    """
    learner = config.learner
    experts: dict[str, int | None] = {}
    pictured: Mapping[str, Any] | None = None
    for role, model in _models(config):
        own = learner.roles.get(role)
        engine, parallel, key = learner.engine_of(role), learner.parallel_of(role), learner.parallel_key(role)
        setting = "model.path" if own is None or own.path is None else f"learner.roles.{role}.path"
        described = read_model_config(Path(model), setting) if Path(model).is_dir() else None
        experts[model] = None if described is None else expert_count(described)
        if role == ACTOR and described is not None and described.get("model_type") in FAMILIES:
            _refuse_roles_apart(learner)
            pictured = described if has_processor(Path(model)) else None
        elif pictured is not None and described is not None:
            check_role(role, setting, described, pictured)
        if engine == "fsdp2":
            heads = attention_heads(described or {}) or 0
            check_parallel(
                parallel, heads=heads, experts=experts[model], processes=learner.ranks_of(role), name=model, key=key
            )
        elif engine == "megatron":
            named = "the actor" if role == ACTOR else f"role {role}"
            check_settings(learner, named)
            if described is not None and (model_type := described.get("model_type")) is not None:
                check_model_type(model_type, learner.engine_key(role))
            if role == ACTOR:
                check_optimizer(learner.optimizer, role=named)
            elif own is not None and own.optimizer is not None:
                check_optimizer(own.optimizer, f"learner.roles.{role}.optimizer", named)
            facts = ModelFacts(model) if described is None else ModelFacts.read(model, described)
            resolve_sizes(parallel, learner.ranks_of(role), facts, key=key)
    check_routers(learner, experts)
    if "megatron" in learner.engines:
        return
    for name, value in learner.megatron:
        if value != getattr(MegatronSection(), name):
            raise ConfigError(
                f"learner.megatron.{name}: {value} is for engine megatron, which no role has",
                hint="leave it out, or set learner.engine: megatron",
            )


def check_routers(learner: LearnerSection, models: Mapping[str, int | None]) -> None:
    """Refuses settings of routers that no model has, or that its engine does not have.

    Args:
        learner: of the configuration.
        models: of all roles, with the number of their experts; None: not known.

    Raises:
        ConfigError: names the key.
    """
    for name, value in learner.router:
        key = f"learner.router.{name}"
        if value and models and not any(experts is None or experts for experts in models.values()):
            raise ConfigError(
                f"{key}: {value} is for models with experts, and {next(iter(models))!r} has none", hint="leave it out"
            )
        if value and name in _ROUTERS_OF_FSDP2 and learner.engine == "megatron":
            raise ConfigError(
                f"{key}: {value} is for models that choose experts by a bias; the families of engine megatron have no "
                "such parameter, and it could not be exported",
                hint="leave it out, set learner.router.load_balance_coeff instead, or train such a model with "
                "learner.engine: fsdp2",
            )


def _refuse_roles_apart(learner: LearnerSection) -> None:
    """Refuses roles with processes of their own next to an actor that takes images: prompts reach them as tokens."""
    for role in learner.roles:
        if learner.is_apart(role):
            raise ConfigError(
                f"learner.roles.{role}.at: the actor takes images, which do not reach a role with processes of its own",
                hint="leave it out: the learner's processes hold the role then",
            )


def _models(config: Config) -> Iterator[tuple[str, str]]:
    """The models of the actor, and of the roles that the configuration names."""
    yield ACTOR, config.model.path
    for name, role in config.learner.roles.items():
        yield name, role.path or config.model.path
