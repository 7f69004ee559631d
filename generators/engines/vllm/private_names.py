"""Undocumented names within vLLM that this package uses, looked up before anything is started.

They belong to the versions that `pyproject.toml` allows; another version is refused here, by name, and not in the
middle of a run.
"""

from __future__ import annotations

import inspect
import pkgutil
from operator import attrgetter
from typing import Any

from rollmesh.mesh.errors import ConfigError

# Path of each -> parameters that it is called with.
_CALLS: dict[str, tuple[str, ...]] = {
    "vllm.v1.engine.async_llm:AsyncLLM._run_output_handler": (),
    "vllm.v1.engine.async_llm:AsyncLLM.from_engine_args": ("engine_args", "stat_loggers"),
    "vllm.v1.engine.async_llm:AsyncLLM.reset_prefix_cache": ("reset_running_requests",),
    "vllm.v1.engine.async_llm:AsyncLLM.reset_encoder_cache": (),
    "vllm.v1.engine.async_llm:AsyncLLM.sleep": ("level", "mode"),
    "vllm.v1.engine.async_llm:AsyncLLM.add_lora": ("lora_request",),
    "vllm.v1.engine.async_llm:AsyncLLM.remove_lora": ("lora_id",),
    "vllm.lora.request:LoRARequest": (),
    "vllm.v1.engine.core_client:AsyncMPClient.add_request_async": ("request",),
    "vllm.v1.engine.core_client:AsyncMPClient.abort_requests_async": ("request_ids",),
    "vllm.v1.engine.core_client:AsyncMPClient.call_utility_async": ("method",),
    "vllm.v1.engine.core_client:AsyncMPClient.call_utility_all_async": ("method",),
    "vllm.v1.engine.core_client:AsyncMPClient.pause_scheduler_async": ("mode", "clear_cache"),
    "vllm.v1.engine.core_client:AsyncMPClient.wake_up_async": ("tags",),
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": (
        "request_id",
        "prompt",
        "supported_tasks",
        "lora_request",
    ),
    "vllm.v1.engine.input_processor:InputProcessor.assign_request_id": ("request",),
    "vllm.v1.engine.output_processor:OutputProcessor": ("tokenizer", "log_stats", "stream_interval"),
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs": ("engine_core_outputs", "weight_version"),
    "vllm.v1.engine.output_processor:OutputProcessor.propagate_error": ("e",),
    "vllm.v1.engine.output_processor:OutputProcessorOutput": ("request_outputs", "reqs_to_abort"),
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer.from_new_request": ("tokenizer", "request"),
    "vllm.v1.engine:EngineCoreRequest": ("request_id", "prompt_token_ids", "data_parallel_rank"),
    "vllm.v1.engine:EngineCoreOutput": ("new_token_ids", "new_logprobs", "finish_reason", "events", "routed_experts"),
    "vllm.v1.engine:FinishReason.ERROR": (),
    "vllm.engine.arg_utils:AsyncEngineArgs": ("enable_sleep_mode", "enable_nccl_comm_suspend"),
    "vllm.v1.engine.coordinator:get_mp_context": (),
    "vllm.v1.engine.utils:get_mp_context": (),
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory._registry": (),
    "vllm.distributed.weight_transfer.factory:WeightTransferTrainerFactory.trainer_init": ("client", "source"),
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info": (),
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": (),
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": (),
}
# Attributes of an engine that is up.
_ATTRIBUTES = (
    "output_processor.stream_interval",
    "input_processor.process_inputs_async",
    "engine_core.outputs_queue",
    "engine_core.resources.engine_manager",
    "model_config.max_model_len",
    "tokenizer",
)


def check_package() -> None:
    """Looks up the names that can be checked before an engine is built.

    Raises:
        ConfigError: names the first that is missing, and vLLM's version.
    """
    for place, parameters in _CALLS.items():
        try:
            value = pkgutil.resolve_name(place)
        except (ImportError, AttributeError) as error:
            raise unsupported_version(f"no {place.replace(':', '.')}") from error
        lacking = [name for name in parameters if name not in inspect.signature(value).parameters]
        if lacking:
            raise unsupported_version(f"{place.replace(':', '.')} takes no {', '.join(lacking)}")


def check_engine(engine: Any) -> None:
    """Looks up the attributes of an engine that is up.

    Raises:
        ConfigError: see `check_package`.
    """
    for path in _ATTRIBUTES:
        try:
            attrgetter(path)(engine)
        except AttributeError as error:
            raise unsupported_version(f"no AsyncLLM.{path}") from error


def unsupported_version(why: str) -> ConfigError:
    """The error of a vLLM that this package cannot drive."""
    import vllm

    return ConfigError(
        f"vLLM {vllm.__version__} does not have what rollmesh uses: {why}",
        hint="install a version that rollmesh was tested with: make vllm, or pip install 'rollmesh[vllm]'",
    )
