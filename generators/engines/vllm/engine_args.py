"""vLLM's engine arguments, of the run's settings. Does not import vLLM."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Literal

from rollmesh.generators.engines.external.served_adapters import MOST_ADAPTERS
from rollmesh.generators.engines.types import EngineSettings
from rollmesh.mesh.config.rollout import VllmSection
from rollmesh.mesh.errors import ConfigError

# Name under which our back end of vLLM's weight transfer is registered (`plugin.register`).
SHARED = "rollmesh"
# The class that vLLM mixes into its workers.
WORKER = "rollmesh.generators.engines.vllm.worker.WorkerExtension"
# Its executor for one worker, which computes in the engine core.
_IN_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# vLLM's variable of the cores of each worker's threads, and what it is by default here.
THREADS_BINDING, UNBOUND = "VLLM_CPU_OMP_THREADS_BIND", "nobind"
TransferName = Literal["shm", "nccl", "ipc"]
_BACKENDS: dict[TransferName, str] = {"shm": SHARED, "nccl": "nccl", "ipc": "ipc"}
_GIB = 2**30
# The ranks for which its kernels are made.
_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def section_of(settings: EngineSettings) -> VllmSection:
    """The settings of vLLM; the defaults without any."""
    return settings.vllm if settings.vllm is not None else VllmSection()


def on_cpu(settings: EngineSettings) -> bool:
    """True where vLLM computes on a CPU."""
    return settings.device == "cpu"


def eager(settings: EngineSettings) -> bool:
    """True where vLLM neither compiles nor records graphs."""
    chosen = section_of(settings).enforce_eager
    return on_cpu(settings) if chosen is None else chosen


def binds_threads() -> bool:
    """True where vLLM binds the threads of each worker on a CPU to cores; only where its own variable asks for that."""
    return os.environ.get(THREADS_BINDING, UNBOUND) != UNBOUND


def workers(settings: EngineSettings) -> int:
    """Worker processes: TP x DP."""
    section = section_of(settings)
    return section.tensor_parallel * section.data_parallel


def transfer_of(settings: EngineSettings) -> TransferName:
    """The transfer of weights from this process into vLLM's workers.

    Raises:
        ConfigError: the chosen transfer cannot work here.
    """
    chosen, cuda = section_of(settings).transfer, not on_cpu(settings)
    if chosen == "auto":
        return "ipc" if cuda and workers(settings) == 1 else "shm"
    if chosen != "shm" and not cuda:
        raise ConfigError(
            f"rollout.vllm.transfer: {chosen} needs CUDA, and this generator runs on a CPU", hint="use auto or shm"
        )
    if chosen == "ipc" and workers(settings) > 1:
        raise ConfigError(
            f"rollout.vllm.transfer: ipc shares the memory of one device, and vLLM uses {workers(settings)} here",
            hint="use shm or nccl",
        )
    return chosen


def check_features(settings: EngineSettings, *, experts: bool) -> None:
    """Refuses settings that vLLM accepts and then fails at.

    Args:
        settings: see there.
        experts: the model is a mixture of experts.

    Raises:
        ConfigError: names the key.
    """
    section = section_of(settings)
    if section.routed_experts and not section.prefix_caching:
        raise ConfigError(
            "rollout.vllm.routed_experts: vLLM reports the experts only with its prefix cache",
            hint="set rollout.vllm.prefix_caching: true",
        )
    if not on_cpu(settings):
        return
    if section.routed_experts:
        raise ConfigError(
            "rollout.vllm.routed_experts: vLLM reports the experts only on CUDA", hint="leave it out on a CPU"
        )
    # Its kernels would read experts that another worker has, from memory that is not theirs.
    if experts and section.expert_parallel and workers(settings) > 1:
        raise ConfigError(
            "rollout.vllm.expert_parallel: vLLM does not divide experts over the workers of a CPU",
            hint="leave it out: tensor_parallel divides each expert",
        )
    if experts and section.data_parallel > 1:
        raise ConfigError(
            "rollout.vllm.data_parallel: vLLM has no copies of a mixture of experts on a CPU",
            hint="start more generators",
        )


def adapter_arguments(rank: int) -> dict[str, Any]:
    """The engine arguments for adapters of a rank.

    Raises:
        ConfigError: vLLM has no such rank.
    """
    fitting = next((known for known in _ADAPTER_RANKS if known >= rank), None)
    if fitting is None:
        raise ConfigError(
            f"learner.lora.rank is {rank}, and vLLM serves adapters up to rank {_ADAPTER_RANKS[-1]}",
            hint="set learner.lora.push: merged",
        )
    return {"enable_lora": True, "max_lora_rank": fitting, "max_loras": MOST_ADAPTERS, "max_cpu_loras": MOST_ADAPTERS}


def engine_arguments(
    folder: Path, settings: EngineSettings, *, context: int | None, tokenizer: bool, experts: bool = False
) -> dict[str, Any]:
    """Arguments by the names of vLLM's AsyncEngineArgs, `weight_transfer_config` as the name of the back end alone.

    Args:
        folder: configuration and tokenizer files.
        settings: see there.
        context: longest sequence in tokens; None: what the model can.
        tokenizer: the folder has one.
        experts: the model is a mixture of experts.

    Raises:
        ConfigError: see `transfer_of`, `check_features` and `adapter_arguments`.
    """
    check_features(settings, experts=experts)
    section = section_of(settings)
    arguments: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "runner": "generate",
        "dtype": settings.dtype,
        "max_model_len": context,
        # vLLM counts the sequences of one copy of the model.
        "max_num_seqs": math.ceil(settings.slots / section.data_parallel),
        "tensor_parallel_size": section.tensor_parallel,
        "data_parallel_size": section.data_parallel,
        "enable_expert_parallel": section.expert_parallel,
        "enable_prefix_caching": section.prefix_caching,
        "enforce_eager": eager(settings),
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": _BACKENDS[transfer_of(settings)],
        "enable_return_routed_experts": section.routed_experts,
        "skip_tokenizer_init": not tokenizer,
        # The one that takes our grammars (`token_grammar`).
        "structured_outputs_config": {"backend": "guidance"},
        # Sampling is what each request says, never what the folder proposes.
        "generation_config": "vllm",
        # Features that former weights made of an image must not be found again.
        "mm_processor_cache_gb": 0,
        "disable_log_stats": True,
        "worker_extension_cls": WORKER,
    }
    if on_cpu(settings):
        arguments["kv_cache_memory_bytes"] = int(section.kv_cache_gib * _GIB)
        if section.tensor_parallel == 1 and not binds_threads():
            # By its short name vLLM replaces it with a process, for which it could bind threads. The messages between
            # the two take as much of the processor as a small model.
            arguments["distributed_executor_backend"] = _IN_CORE
    else:
        arguments["gpu_memory_utilization"] = section.gpu_memory_utilization
        arguments["enable_sleep_mode"] = True
        if settings.release == "memory" and section.tensor_parallel > 1:
            # The buffers of the workers' communicators are given back too.
            arguments["enable_nccl_comm_suspend"] = True
    if settings.adapters is not None:
        arguments |= adapter_arguments(settings.adapters.rank)
    return arguments | section.options
