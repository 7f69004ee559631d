"""Builds the algorithm, the engines of its roles and the worker from the configuration."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

import torch

from rollmesh.learner.algorithm_requirements import base_roles, check_needs
from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.settings import SettingsError
from rollmesh.learner.algorithms.types import ModelRole, UpdatePlan
from rollmesh.learner.checkpoint.compatibility import trained_form
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.distributed.prompt_images import PromptImageSource
from rollmesh.learner.distributed.role_batch import RoleElsewhere
from rollmesh.learner.distributed.routed_experts import ExpertSource
from rollmesh.learner.distributed.step_profiler import FOLDER as PROFILE_FOLDER
from rollmesh.learner.distributed.step_profiler import StepProfiler
from rollmesh.learner.distributed.trajectories import TrajectorySource
from rollmesh.learner.distributed.worker import Worker, WorkerRules
from rollmesh.learner.engine_specs import compute_deterministically, device_of, engine_spec
from rollmesh.learner.engines.flight_recorder import record_collectives
from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.learner.engines.megatron.environment import prepare_environment
from rollmesh.learner.engines.registry import ModelType, create_engine
from rollmesh.learner.engines.rendezvous import open_board
from rollmesh.learner.engines.world import World
from rollmesh.learner.liveness.rank_watch import RankId, RankWatch
from rollmesh.learner.model_files.checks import check_role_tokens
from rollmesh.learner.model_files.location import resolve_model
from rollmesh.learner.roles.remote_role import RemoteRole
from rollmesh.mesh.config.derived.memory_release import REST_KEY, rest_folder
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection, RoleSection
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.parallel import RouterSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.files import require_writable
from rollmesh.mesh.runtime.devices import choose_device
from rollmesh.mesh.runtime.host_memory import is_in_memory
from rollmesh.mesh.runtime.memory_tuning import allocate_from_one_heap
from rollmesh.mesh.runtime.ranks import world_size
from rollmesh.mesh.runtime.threads import available_cores, given_threads, plan_threads

log = logging.getLogger(__name__)
# More than the launcher's own longest, for a process that sleeps.
_SILENT_FACTOR = 4.0
_MODEL_TYPES: tuple[ModelType, ...] = ("language_model", "value_model")


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm of a run.

    Raises:
        ConfigError: unknown name or setting; no correction although data can be stale; or a need of the algorithm
            that the configuration does not provide.
    """
    plan = UpdatePlan(
        minibatches=config.learner.batch.minibatches,
        epochs=config.learner.batch.epochs,
        max_staleness=config.buffer.max_staleness,
        max_response_tokens=config.rollout.max_response_tokens,
        group_size=config.rollout.n,
        steps=config.learner.steps,
        seed=config.run.seed,
    )
    try:
        algorithm = load_algorithm(config.algorithm.name, config.algorithm.params, plan)
    except SettingsError as error:
        raise ConfigError(str(error), hint=error.hint) from error
    check_needs(config, algorithm.needs)
    return algorithm


def build_engines(config: Config, algorithm: Algorithm) -> dict[str, Engine]:
    """The engines of this rank by role, the actor first, each proven right; collective over the ranks.

    A role without a model of its own starts from the actor's initial weights, also where the actor continues from a
    checkpoint. That is the definition of a reference policy.

    Args:
        config: of the run; the model's path is a local folder.
        algorithm: names the roles.

    Raises:
        ConfigError: no such engine, or CUDA was asked for and is absent; the folder in which the learner rests on a
            CPU cannot be written.
        DataError: a model cannot be loaded, is not computed as transformers computes it, or has other tokens than the
            actor's.
    """
    if config.learner.deterministic:
        compute_deterministically()
    here = [role for role in algorithm.needs.roles if not config.learner.is_apart(role.name)]
    if "megatron" in {config.learner.engine_of(name) for name in (ACTOR, *(role.name for role in here))}:
        # Another role's engine may start CUDA.
        prepare_environment()
    folder = rest_folder(config, on_cpu=choose_device(config.learner.device, "learner.device") == "cpu")
    if folder is not None:
        # At the first swap it would be an error after which the learner is started again.
        require_writable(folder, REST_KEY)
        # Before engines start their threads.
        allocate_from_one_heap()
    needs = algorithm.needs
    models = {role.name: _model(config, role) for role in here}
    engines = {ACTOR: build_actor(config, entropy_gradient=needs.entropy_gradient)}
    for role in here:
        if role.name not in base_roles(config, needs.roles):
            engines[role.name] = _role_engine(config, role, models[role.name])
    actor = engines[ACTOR]
    if actor.device.type == "cuda" and actor.layout.leads and config.model.dtype == "float32":
        log.warning("weights are sent, and generators compute, in float32: on CUDA set model.dtype: bfloat16")
    if folder is not None and actor.world.process == 0 and is_in_memory(folder):
        log.warning("files in %s take memory: set %s to a folder on a disk", folder, REST_KEY)
    for name, engine in engines.items():
        _prove(config, name, engine)
    return engines


def build_role(config: Config, role: ModelRole) -> Engine:
    """The engine of a role with processes of its own, proven right; collective over them.

    Args:
        config: of the run; the model's path is a local folder.
        role: of the algorithm.

    Raises:
        ConfigError: as `build_engines`.
        DataError: as `build_engines`.
    """
    if config.learner.deterministic:
        compute_deterministically()
    if config.learner.engine_of(role.name) == "megatron":
        prepare_environment()
    engine = _role_engine(config, role, _model(config, role))
    _prove(config, role.name, engine)
    return engine


def roles_elsewhere(config: Config, algorithm: Algorithm, world: World) -> dict[str, RemoteRole]:
    """The roles whose models have processes of their own, by name.

    Args:
        config: of the run.
        algorithm: of the run.
        world: the learner's processes.
    """
    roles = algorithm.needs.roles
    return {role.name: RemoteRole(role, algorithm, world) for role in roles if config.learner.is_apart(role.name)}


def _role_engine(config: Config, role: ModelRole, model: ModelSection) -> Engine:
    section = _section(config, role)
    optimizer = (section.optimizer or config.learner.optimizer) if role.trained else None
    return _engine(config, role.name, model, optimizer, _model_type(role), offload=section.offload)


def _prove(config: Config, name: str, engine: Engine) -> None:
    """Proves that a role's model is computed right; collective."""
    evidence = engine.probe()
    if engine.world.process == 0:
        engine_name, packing = config.learner.describe_engine(name), engine.packing.value
        log.info("role %s: %s, packing %s; %s", name, engine_name, packing, evidence)


def build_actor(config: Config, *, entropy_gradient: bool = False) -> Engine:
    """The actor's engine of this rank; collective over the ranks.

    Args:
        config: of the run; the model's path is a local folder.
        entropy_gradient: losses differentiate the entropy.

    Raises:
        ConfigError: as `build_engines`.
        DataError: as `build_engines`.
    """
    optimizer = config.learner.optimizer
    return _engine(
        config,
        ACTOR,
        config.model,
        optimizer,
        "language_model",
        entropy_gradient=entropy_gradient,
        lora=config.learner.lora,
        router=config.learner.router,
        frozen=tuple(config.learner.frozen),
    )


def _engine(
    config: Config,
    role: str,
    model: ModelSection,
    optimizer: OptimizerSection | None,
    model_type: ModelType,
    *,
    entropy_gradient: bool = False,
    lora: LoraSection | None = None,
    router: RouterSection | None = None,
    frozen: tuple[str, ...] = (),
    offload: bool = False,
) -> Engine:
    spec = engine_spec(
        config.learner,
        model,
        optimizer,
        total_steps=config.learner.steps,
        seed=config.run.seed,
        longest=config.rollout.max_prompt_tokens + config.rollout.max_response_tokens,
        parallel=config.learner.parallel_of(role),
        lora=lora,
        frozen=frozen,
        router=router,
        entropy_gradient=entropy_gradient,
        offload=offload,
        rest_folder=rest_folder(config, on_cpu=device_of(config.learner.device) == "cpu"),
    )
    return create_engine(spec, model_type=model_type, backend=config.learner.engine_of(role))


def _section(config: Config, role: ModelRole) -> RoleSection:
    return config.learner.roles.get(role.name) or RoleSection()


def _model(config: Config, role: ModelRole) -> ModelSection:
    section = _section(config, role)
    if section.path is None:
        return config.model
    own = {"path": section.path, "revision": section.revision}
    model = resolve_model(config.model.model_copy(update=own), f"learner.roles.{role.name}")
    check_role_tokens(Path(config.model.path), Path(model.path), f"learner.roles.{role.name}.path")
    return model


def _model_type(role: ModelRole) -> ModelType:
    for known in _MODEL_TYPES:
        if role.kind == known:
            return known
    raise ConfigError(
        f"role {role.name!r} of the algorithm is of the unknown kind {role.kind!r}",
        hint=f"known: {', '.join(_MODEL_TYPES)}",
    )


def open_watch(config: Config) -> RankWatch:
    """The watch over the other ranks, by which this one is heard from now on.

    Raises:
        ConfigError: ranks of several machines do not reach one another.
    """
    limit_s = config.learner.distributed.timeout_s
    # Where a launcher looks at the processes, it is the first to name one that is frozen.
    return watch_ranks(config.run.folder, limit_s, _SILENT_FACTOR * config.resources.frozen_after_s or limit_s)


def watch_ranks(folder: Path, limit_s: float, silent_s: float) -> RankWatch:
    """The watch over the other ranks of whatever trains.

    Args:
        folder: of the run.
        limit_s: deadline of the ranks' collectives.
        silent_s: a rank that is not heard for longer is lost; `limit_s` at most.

    Raises:
        ConfigError: ranks of several machines do not reach one another.
    """
    if world_size() > 1:
        record_collectives(folder)
    rank_id = RankId(int(os.environ.get("RANK", "0")), world_size())
    return RankWatch(open_board(timedelta(seconds=limit_s)), rank_id, silent_s=min(limit_s, silent_s))


def build_worker(
    config: Config,
    engines: dict[str, Engine],
    algorithm: Algorithm,
    payloads: TrajectorySource,
    checkpoints: Path,
    *,
    images: Path,
    experts: ExpertSource | None = None,
    elsewhere: Mapping[str, RoleElsewhere] = MappingProxyType({}),
) -> Worker:
    """This rank's worker.

    Args:
        config: of the run.
        engines: of this rank by role.
        algorithm: of the run.
        payloads: this rank's trajectories.
        checkpoints: folder of the checkpoints.
        images: folder of the prompts' images.
        experts: recorded by generators; None: they are not replayed.
        elsewhere: roles whose models other processes hold.
    """
    batch, profile = config.learner.batch, config.learner.profile
    return Worker(
        engines,
        algorithm,
        payloads,
        CheckpointStore(checkpoints),
        WorkerRules(
            epochs=batch.epochs,
            token_budget=batch.tokens_per_micro_batch,
            seed=config.run.seed,
            profiler=StepProfiler(profile, engines[ACTOR].device, profile.dir or config.run.folder / PROFILE_FOLDER),
            base_roles=base_roles(config, algorithm.needs.roles),
            form=trained_form(config.learner, algorithm),
        ),
        experts=experts,
        elsewhere=elsewhere,
        images=PromptImageSource.load(Path(config.model.path), images),
    )


def set_learner_threads(config: Config) -> None:
    """The launcher decides through the environment; a learner started by hand decides here.

    The numerical libraries may have been loaded in another environment: services are forked.
    """
    plan = plan_threads(
        available_cores(),
        ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        replicas=config.rollout.replicas,
        in_turns=config.placement.all_take_turns,
        learner=given_threads(os.environ) or config.resources.learner_threads,
    )
    torch.set_num_threads(plan.learner)
