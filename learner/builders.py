"""Builds the algorithm, the engines of its roles and the worker from the configuration."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path

import torch

from rollmesh.learner.algorithm_requirements import base_roles, check_needs
from rollmesh.learner.algorithms.interface import Algorithm
from rollmesh.learner.algorithms.load import load_algorithm
from rollmesh.learner.algorithms.settings import SettingsError
from rollmesh.learner.algorithms.types import ModelRole, UpdatePlan
from rollmesh.learner.checkpoint.compatibility import optimizer_forms
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.distributed.prompt_images import PromptImageSource
from rollmesh.learner.distributed.step_profiler import FOLDER as PROFILE_FOLDER
from rollmesh.learner.distributed.step_profiler import StepProfiler
from rollmesh.learner.distributed.trajectories import TrajectorySource
from rollmesh.learner.distributed.worker import Worker, WorkerRules
from rollmesh.learner.engines.device_peaks import peak_tflops
from rollmesh.learner.engines.flight_recorder import record_collectives
from rollmesh.learner.engines.interface import ACTOR, Engine, EngineSpec
from rollmesh.learner.engines.megatron.environment import prepare_environment
from rollmesh.learner.engines.registry import ModelType, create_engine
from rollmesh.learner.engines.rendezvous import open_board
from rollmesh.learner.liveness.rank_watch import RankId, RankWatch
from rollmesh.learner.model_files.location import resolve_model
from rollmesh.mesh.config.base import DeviceName
from rollmesh.mesh.config.derived.memory_release import REST_KEY, rest_folder
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection, RoleSection
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.files import require_writable
from rollmesh.mesh.runtime.devices import DeviceType, choose_device
from rollmesh.mesh.runtime.host_memory import is_in_memory
from rollmesh.mesh.runtime.memory_tuning import allocate_from_one_heap
from rollmesh.mesh.runtime.ranks import world_size
from rollmesh.mesh.runtime.threads import available_cores, plan_threads

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
        DataError: a model cannot be loaded, or is not computed as transformers computes it.
    """
    if config.learner.deterministic:
        _compute_deterministically()
    if "megatron" in config.learner.engines:
        # Another role's engine may start CUDA.
        prepare_environment()
    folder = rest_folder(config, on_cpu=choose_device(config.learner.device, "learner.device") == "cpu")
    if folder is not None:
        # At the first swap it would be an error after which the learner is started again.
        require_writable(folder, REST_KEY)
        # Before engines start their threads.
        allocate_from_one_heap()
    needs = algorithm.needs
    models = {role.name: _model(config, role) for role in needs.roles}
    engines = {ACTOR: build_actor(config, entropy_gradient=needs.entropy_gradient)}
    for role in needs.roles:
        if role.name in base_roles(config, needs.roles):
            continue
        optimizer = None
        if role.trained:
            optimizer = _section(config, role).optimizer or config.learner.optimizer
        offload = _section(config, role).offload
        model, kind = models[role.name], _model_type(role)
        engines[role.name] = _engine(config, role.name, model, optimizer, kind, offload=offload)
    actor = engines[ACTOR]
    if actor.device.type == "cuda" and actor.layout.leads and config.model.dtype == "float32":
        log.warning("weights are sent, and generators compute, in float32: on CUDA set model.dtype: bfloat16")
    if folder is not None and actor.world.process == 0 and is_in_memory(folder):
        log.warning("files in %s take memory: set %s to a folder on a disk", folder, REST_KEY)
    for name, engine in engines.items():
        evidence = engine.probe()
        if engine.world.process == 0:
            engine_name, packing = config.learner.describe_engine(name), engine.packing.value
            log.info("role %s: %s, packing %s; %s", name, engine_name, packing, evidence)
    return engines


def _compute_deterministically() -> None:
    # cuBLAS reads it with the first product: one workspace for each stream, so that sums keep their order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Kernels are not chosen by the clock.
    torch.backends.cudnn.benchmark = False


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
    frozen: tuple[str, ...] = (),
    offload: bool = False,
) -> Engine:
    batch = config.learner.batch
    device = device_of(config.learner.device)
    param_dtype, recompute = config.learner.compute_on(device)
    spec = EngineSpec(
        model=model,
        optimizer=optimizer,
        total_steps=config.learner.steps * batch.minibatches * batch.epochs,
        device=device,
        param_dtype=param_dtype,
        float32_logits=config.learner.float32_logits,
        activation_checkpointing=recompute,
        compile=config.learner.compile,
        seed=config.run.seed,
        entropy_gradient=entropy_gradient,
        attention=config.learner.attention,
        sync_once=config.learner.gradient_sync == "step",
        memory=config.learner.memory,
        parallel=config.learner.parallel_of(role),
        megatron=config.learner.megatron,
        lora=lora,
        frozen=frozen,
        offload=offload,
        rest_folder=rest_folder(config, on_cpu=device == "cpu"),
        longest=config.rollout.max_prompt_tokens + config.rollout.max_response_tokens,
        timeout_s=config.learner.distributed.timeout_s,
        peak_tflops=config.learner.device_peak_tflops or _peak_tflops(device, param_dtype),
    )
    return create_engine(spec, model_type=model_type, backend=config.learner.engine_of(role))


def _peak_tflops(device: DeviceType, param_dtype: str) -> float | None:
    """The peak of this rank's device; None where it is not known."""
    if device == "cpu":
        return None
    return peak_tflops(torch.cuda.get_device_name(int(os.environ.get("LOCAL_RANK", "0"))), param_dtype)


def _section(config: Config, role: ModelRole) -> RoleSection:
    return config.learner.roles.get(role.name) or RoleSection()


def _model(config: Config, role: ModelRole) -> ModelSection:
    section = _section(config, role)
    if section.path is None:
        return config.model
    own = {"path": section.path, "revision": section.revision}
    return resolve_model(config.model.model_copy(update=own), f"learner.roles.{role.name}")


def _model_type(role: ModelRole) -> ModelType:
    for known in _MODEL_TYPES:
        if role.kind == known:
            return known
    raise ConfigError(
        f"role {role.name!r} of the algorithm is of the unknown kind {role.kind!r}",
        hint=f"known: {', '.join(_MODEL_TYPES)}",
    )


def device_of(setting: DeviceName) -> DeviceType:
    """The device of this rank.

    Raises:
        ConfigError: CUDA is asked for and absent; there is no device for this rank.
    """
    if choose_device(setting, "learner.device") == "cpu":
        return "cpu"
    place, visible = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= visible:
        raise ConfigError(
            f"LOCAL_RANK is {place}, and this rank sees {visible} CUDA device(s): rank r of a machine takes device r",
            hint="let each rank see the devices of all ranks of its machine in CUDA_VISIBLE_DEVICES, or start fewer",
        )
    return "cuda"


def open_watch(config: Config) -> RankWatch:
    """The watch over the other ranks, by which this one is heard from now on.

    Raises:
        ConfigError: ranks of several machines do not reach one another.
    """
    limit_s = config.learner.distributed.timeout_s
    if world_size() > 1:
        record_collectives(config.run.folder)
    # Where a launcher looks at the processes, it is the first to name one that is frozen.
    frozen_s = _SILENT_FACTOR * config.resources.frozen_after_s or limit_s
    rank_id = RankId(int(os.environ.get("RANK", "0")), world_size())
    return RankWatch(open_board(timedelta(seconds=limit_s)), rank_id, silent_s=min(limit_s, frozen_s))


def build_worker(
    config: Config,
    engines: dict[str, Engine],
    algorithm: Algorithm,
    payloads: TrajectorySource,
    checkpoints: Path,
    *,
    images: Path,
) -> Worker:
    """This rank's worker.

    Args:
        config: of the run.
        engines: of this rank by role.
        algorithm: of the run.
        payloads: this rank's trajectories.
        checkpoints: folder of the checkpoints.
        images: folder of the prompts' images.
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
            optimizers=optimizer_forms(config.learner, algorithm),
        ),
        PromptImageSource.load(Path(config.model.path), images),
    )


def set_learner_threads(config: Config) -> None:
    """The launcher decides through the environment; a learner started by hand decides here."""
    if "OMP_NUM_THREADS" not in os.environ:
        plan = plan_threads(
            available_cores(),
            ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            replicas=config.rollout.replicas,
            in_turns=config.placement.all_take_turns,
            learner=config.resources.learner_threads,
        )
        torch.set_num_threads(plan.learner)
