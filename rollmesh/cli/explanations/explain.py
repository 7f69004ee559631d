"""The consequences of a configuration, in words and numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from rollmesh.launcher.placement.description import core_notices, describe_turns, placement_notices, rest_notices
from rollmesh.launcher.placement.devices import device_plan
from rollmesh.launcher.services import describe_threads, interpreters_of, thread_plan
from rollmesh.mesh.config.derived.generator_places import generator_places
from rollmesh.mesh.config.inputs import DataSection
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.rollout import RolloutSection
from rollmesh.mesh.config.scorers.parts import describe
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.liveness.freeze_detector import Bounds
from rollmesh.mesh.runtime.threads import available_cores, reward_workers


def _mixture(data: DataSection) -> str:
    """The shares of the sources of training data, in words."""
    if data.curriculum is not None:
        return f"{', '.join(source.label for source in data.train)}, in shares that {data.curriculum} sets"
    total = sum(source.weight or 0.0 for source in data.train)
    if not total:
        rows = ", in proportion to their rows" if len(data.train) > 1 else ""
        return ", ".join(source.label for source in data.train) + rows
    return ", ".join(f"{source.label} {(source.weight or 0.0) / total:.1%}" for source in data.train)


def explain(config: Config) -> Iterator[str]:
    """Derived values, one per line, each with its derivation."""
    batch, rollout, buffer = config.learner.batch, config.rollout, config.buffer
    samples = batch.groups * rollout.n
    tokens = rollout.max_prompt_tokens + rollout.max_response_tokens
    live = batch.groups * (buffer.max_staleness + 1)
    yield f"run folder: {config.run.folder}"
    yield f"samples per step: {batch.groups} groups x {rollout.n} responses = {samples}"
    yield f"optimizer steps per batch: {batch.epochs} epoch(s) x {batch.minibatches} minibatch(es)"
    yield (
        f"samples of the run: {samples} x {config.learner.steps} steps = {samples * config.learner.steps}"
        f" ({batch.groups * config.learner.steps} prompts)"
    )
    yield f"training data: {_mixture(config.data)}"
    epochs = config.data.epochs
    passes = f", or after {epochs} pass(es) over the data where that is sooner" if epochs else ""
    yield f"end of the run, and of schedules of the learning rate: after {config.learner.steps} steps{passes}"
    yield (
        f"tokens of a step: at most {samples} x ({rollout.max_prompt_tokens} prompt + "
        f"{rollout.max_response_tokens} response) = {samples * tokens}; packed {batch.tokens_per_micro_batch} "
        "to a forward pass"
    )
    yield f"packing: {_packing(config)}"
    yield f"learner: {config.learner.describe_engine('actor')}; {_compute(config)}"
    yield f"live groups: at most {batch.groups} x ({buffer.max_staleness} + 1) = {live}"
    yield (
        f"staleness: no trained token is older than {buffer.max_staleness} versions"
        + (" (on-policy)" if buffer.max_staleness == 0 else "")
    )
    yield f"prompt tasks kept ready: {buffer.seed_ahead} x {batch.groups} = {buffer.seed_ahead * batch.groups}"
    limit = f"{buffer.stall_limit_s:g} s" if buffer.stall_limit_s else "without limit"
    yield (
        f"deadlines: scorer {config.reward.scorer_timeout_s:g} s < reward call {config.reward.timeout_s:g} s < "
        f"rollout's wait for its reward {rollout.reward_wait_s:g} s < a run without progress {limit}"
    )
    yield f"stalls: reported once there was no progress for {buffer.stall_s:g} s; the run ends then: {limit}"
    yield _frozen(config)
    yield (
        f"leases: {buffer.lease_s:g} s, renewed by heartbeats; {buffer.reconnect_grace_s:g} s once a stream breaks; "
        f"a group is handed out at most {rollout.max_attempts} times"
    )
    yield (
        f"network: calls {config.network.rpc_timeout_s:g} s, a lost peer is retried for {config.network.retry_s:g} s, "
        f"a bucket of weights {config.weights.timeout_s:g} s"
    )
    yield f"threads: {describe_threads(config, thread_plan(config))}"
    yield from _devices(config)
    yield f"generators: engine {rollout.engine}{_spread(rollout)}"
    for interpreter in interpreters_of(config):
        if interpreter.path is not None:
            yield f"{interpreter.field}: {interpreter.path}"
    yield f"sequences decoded together: {len(generator_places(config))} generator(s) x {rollout.slots}"
    yield f"reward: {_rewards(config)}"
    if not config.reward.endpoints:
        where = "in each generator" if config.reward.in_process else "in the reward service"
        computing, waiting = reward_workers(config.reward.workers)
        number = f"{computing} processes"
        if computing != waiting:
            number = f"{computing} processes for rewards that compute, {waiting} for rewards that wait"
        yield (
            f"reward workers: at most {number}, {where}; a call that is "
            f"not done after {config.reward.scorer_timeout_s:g} s costs its worker, which is replaced"
        )
    yield f"buffer: {_front(config)}"
    port = config.network.port or "a free port, see mesh.json in the run folder"
    yield f"mesh address: {config.network.advertise or config.network.host}, port {port}"
    yield (
        "not checked here: whether the files and models exist, and what the devices of the run's machine can; "
        "`rollmesh run` refuses to start without them"
    )


def _packing(config: Config) -> str:
    """The packing of the actor's sequences, read from its folder."""
    if config.learner.engine == "megatron":
        return "sequences side by side, each with its prompt"
    if config.learner.engine != "fsdp2":
        return f"known to the engine {config.learner.engine} alone"
    if not Path(config.model.path).is_dir():
        return "known once the model is downloaded"
    from rollmesh.learner.engines.fsdp2.packing_choice import describe_packing

    return describe_packing(config.model)


def _compute(config: Config) -> str:
    """Compute dtypes and recomputation, by the device that a learner finds."""
    devices: tuple[Literal["cpu", "cuda"], ...] = ("cuda", "cpu")
    parts = []
    for device in devices:
        if config.learner.device in ("auto", device):
            dtype, recompute = config.learner.compute_on(device)
            how = "activations recomputed" if recompute else "activations kept"
            parts.append(f"{dtype} on {'CUDA' if device == 'cuda' else 'a CPU'}, {how}")
    return f"{'; '.join(parts)}; weights travel and generators compute in {config.model.dtype} (model.dtype)"


def _frozen(config: Config) -> str:
    """The bounds after which silence is a failure."""
    from rollmesh.generators.engine_watch import bounds_of
    from rollmesh.learner.liveness.hang_guard import AT_LEAST_S, FACTOR

    after_s, first_s = config.resources.frozen_after_s, config.buffer.stall_limit_s
    if not after_s:
        return "frozen services: not detected (resources.frozen_after_s: 0)"
    first = f"{max(first_s, AT_LEAST_S):g} s" if first_s else "any time"
    service, engine = Bounds.of(after_s), bounds_of(after_s)
    return (
        f"frozen services: killed and restarted after {service.stopped_s:g} s stopped, {service.running_s:g} s of "
        f"processor time or {service.asleep_s:g} s asleep without an answer (the embedded Redis too; a generator's "
        f"engine: {engine.stopped_s:g} / {engine.running_s:g} / {engine.asleep_s:g} s), or where a learner's step "
        f"lasts {FACTOR:g} times as long as the longest, {AT_LEAST_S:g} s at least (its first one: {first}); at most "
        f"{config.resources.max_restarts} restarts of one within a day"
    )


def _front(config: Config) -> str:
    """The servers of the buffer, and the state that survives."""
    buffer = config.buffer
    redis = "a Redis of your own, as durable as it is configured"
    if buffer.redis is None:
        redis = {
            "always": "an embedded Redis; every acknowledged write survives its end (durability: always)",
            "everysec": "an embedded Redis; its last two seconds may be lost with the machine (durability: everysec)",
            "none": "an embedded Redis; nothing survives its end (durability: none)",
        }[buffer.durability]
    return f"{buffer.fronts} front(s) on {redis}"


def _devices(config: Config) -> Iterator[str]:
    """The placement, and the devices on this machine, which may be another one than the run's."""
    try:
        plan = device_plan(config)
    except ConfigError as error:
        yield describe_turns(config, None)
        yield f"devices: not enough for this run on this machine: {error}"
        yield from placement_notices(config, None)
        return
    yield describe_turns(config, plan)
    yield f"devices: {plan.describe()}"
    yield from rest_notices(config, plan)
    yield from core_notices(config, plan, available_cores())
    yield from placement_notices(config, plan)


def _spread(rollout: RolloutSection) -> str:
    """The spread of an engine over several devices; empty for one."""
    if rollout.engine == "hf":
        return ""
    section = rollout.vllm if rollout.engine == "vllm" else rollout.sglang
    return f", tensor parallel {section.tensor_parallel}, data parallel {section.data_parallel}"


def _rewards(config: Config) -> str:
    if config.reward.endpoints:
        return f"remote, {', '.join(config.reward.endpoints)}"
    where = "inside the generators" if config.reward.in_process else "by a reward service started here"
    return f"{' + '.join(map(describe, config.reward.functions))}, {where}"
