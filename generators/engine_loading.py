"""Builds an engine that can start from the model files of a run."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rollmesh.generators.engine_events import EngineEventBridge
from rollmesh.generators.engines import create_engine
from rollmesh.generators.engines.adapters import AdapterShape
from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.types import EngineSettings, KvPolicy
from rollmesh.generators.tokenizer import TokenizerCodec
from rollmesh.mesh.agent_tools import agent_schemas
from rollmesh.mesh.config.derived.generator_places import generator_places
from rollmesh.mesh.config.derived.memory_release import Release, release_of
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.runtime.devices import choose_device

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and the parts that belong to it.

    Attributes:
        engine: not started.
        text: the model's tokenizer.
        events: where its results arrive.
    """

    engine: InferenceEngine
    text: TokenizerCodec
    events: EngineEventBridge


def load_libraries(threads: int) -> None:
    """Imports the heavy packages, which takes seconds, and sets torch's intra-op threads."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    # transformers imports what a name stands for when the name is first asked for.
    for name in ("AutoModelForCausalLM", "AutoTokenizer", "PreTrainedModel"):
        getattr(transformers, name)


def load_engine(
    config: Config, folder: Path, events: EngineEventBridge, *, threads: int, release: Release | None = None
) -> LoadedEngine:
    """Builds engine and tokenizer from the model files; takes seconds.

    Args:
        config: of the run.
        folder: configuration and tokenizer files of the model.
        events: listens to the engine.
        threads: compute threads.
        release: the way in which it gives memory back; None: it never sleeps.

    Raises:
        ConfigError, DataError: the engine or the model cannot be built.
    """
    rollout = config.rollout
    device = choose_device(rollout.device, "rollout.device")
    settings = EngineSettings(
        slots=rollout.slots,
        dtype=config.model.dtype,
        context=rollout.context_tokens,
        kv=kv_policy(config),
        device=device,
        sharing=sharing(config, device),
        threads=threads,
        allow_insecure=config.security.allow_insecure,
        release=release,
        adapters=_adapter_shape(config.learner.served_adapter),
        # The learner asks again after this, and is not to wait for the same start.
        restart_timeout_s=config.placement.step_timeout_s,
        hf=rollout.hf,
        vllm=rollout.vllm,
        sglang=rollout.sglang,
    )
    # Users' modules are imported here, where it may take its time; later uses find them loaded.
    agent_schemas(rollout.agent)
    return LoadedEngine(create_engine(rollout.engine, folder, settings, events), TokenizerCodec(folder), events)


def kv_policy(config: Config) -> KvPolicy:
    """The treatment of running sequences at a swap."""
    if config.weights.kv != "auto":
        return config.weights.kv
    # Running sequences keep their adapter, and its keys and values; whole weights would leave SGLang with mixed ones.
    whole = config.learner.served_adapter is None
    return "recompute" if config.rollout.engine == "sglang" and whole else "keep"


def _adapter_shape(section: LoraSection | None) -> AdapterShape | None:
    if section is None:
        return None
    return AdapterShape(section.rank, () if section.targets == "all-linear" else section.targets)


def release_here(config: Config) -> Release:
    """The way in which a sleeping engine of this run gives memory back on this machine."""
    on_cpu = choose_device(config.rollout.device, "rollout.device") == "cpu"
    release = release_of(config, on_cpu=on_cpu)
    if release == "memory" and on_cpu and config.rollout.owns_processes:
        log.warning(
            "placement.release: memory gives nothing back: asleep on a CPU, %s keeps all its memory; process ends its "
            "processes instead",
            config.rollout.engine,
        )
    return release


def sharing(config: Config, device: str) -> int:
    """Most processes of the run that use one device's memory at the same time.

    On a CPU these are its generators. A learner that takes turns with generators has no memory in theirs.
    """
    named = config.placement.devices
    if device == "cpu":
        return max(1, len(generator_places(config)))
    if not named.generators:
        return 1
    learner = () if config.placement.learner_takes_turns else (named.learner or ())
    users = Counter([*(number for devices in named.generators for number in devices), *learner])
    return max((users[number] for devices in named.generators for number in devices), default=1)
