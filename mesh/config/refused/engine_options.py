"""Engine arguments that `rollout.vllm.options` and `rollout.sglang.options` may not set.

Some repeat a key of the configuration, with which the rest of a generator computes. Others change what it relies on,
lead to where weights do not reach, or make another model of the one that is trained. Accepted, a run would train on
what no one sampled, or not start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAME = re.compile(r"(--)?[A-Za-z][A-Za-z0-9_-]*")
_OURS = "rollmesh relies on its own value"
_ONE_HOST = "weights reach the workers of one host alone"
_ANOTHER = "the model that is sampled would be another than the one that is trained"
_DRAWS = "responses would be drawn from another distribution than the one that is trained"
_LENGTH = "rollout.max_prompt_tokens and rollout.max_response_tokens set it"


def _set_by(key: str) -> str:
    return f"{key} sets it"


# Argument -> why not.
VLLM: Mapping[str, str] = {
    "model": _set_by("model.path"),
    "dtype": _set_by("model.dtype"),
    "max_model_len": _LENGTH,
    "max_num_seqs": _set_by("rollout.slots"),
    "tensor_parallel_size": _set_by("rollout.vllm.tensor_parallel"),
    "data_parallel_size": _set_by("rollout.vllm.data_parallel"),
    "enable_expert_parallel": _set_by("rollout.vllm.expert_parallel"),
    "gpu_memory_utilization": _set_by("rollout.vllm.gpu_memory_utilization"),
    "enforce_eager": _set_by("rollout.vllm.enforce_eager"),
    "enable_prefix_caching": _set_by("rollout.vllm.prefix_caching"),
    "enable_return_routed_experts": _set_by("rollout.vllm.routed_experts"),
    "weight_transfer_config": _set_by("rollout.vllm.transfer"),
    "seed": _set_by("run.seed"),
    **dict.fromkeys(("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras"), _set_by("learner.lora")),
    **dict.fromkeys(
        (
            "load_format",
            "runner",
            "logprobs_mode",
            "skip_tokenizer_init",
            "generation_config",
            "mm_processor_cache_gb",
            "structured_outputs_config",
            "disable_log_stats",
            "enable_sleep_mode",
            "worker_extension_cls",
        ),
        _OURS,
    ),
    **dict.fromkeys(
        (
            "hf_overrides",
            "hf_config_path",
            "quantization",
            "quantization_config",
            "model_class_overrides",
            "disable_sliding_window",
        ),
        _ANOTHER,
    ),
    **dict.fromkeys(("logits_processors", "watermark_config", "override_generation_config"), _DRAWS),
    **dict.fromkeys(("pipeline_parallel_size", "prefill_context_parallel_size"), "use rollout.vllm.tensor_parallel"),
    **dict.fromkeys(
        (
            "nnodes",
            "node_rank",
            "master_addr",
            "master_port",
            "distributed_executor_backend",
            "data_parallel_rank",
            "data_parallel_start_rank",
            "data_parallel_size_local",
            "data_parallel_address",
            "data_parallel_rpc_port",
            "data_parallel_backend",
            "data_parallel_hybrid_lb",
            "data_parallel_external_lb",
        ),
        _ONE_HOST,
    ),
}

# Under all the names that a server takes.
SGLANG: Mapping[str, str] = {
    **dict.fromkeys(("model_path", "model"), _set_by("model.path")),
    "dtype": _set_by("model.dtype"),
    "context_length": _LENGTH,
    "max_running_requests": _set_by("rollout.slots"),
    **dict.fromkeys(("tp_size", "tp", "tensor_parallel_size"), _set_by("rollout.sglang.tensor_parallel")),
    **dict.fromkeys(("dp_size", "dp", "data_parallel_size"), _set_by("rollout.sglang.data_parallel")),
    **dict.fromkeys(("ep_size", "ep", "expert_parallel_size"), _set_by("rollout.sglang.expert_parallel")),
    "mem_fraction_static": _set_by("rollout.sglang.mem_fraction"),
    "max_total_tokens": _set_by("rollout.sglang.kv_cache_tokens"),
    "disable_overlap_schedule": _set_by("weights.kv"),
    "random_seed": _set_by("run.seed"),
    **dict.fromkeys(
        (
            "enable_lora",
            "lora_paths",
            "lora_target_modules",
            "max_loaded_loras",
            "max_lora_rank",
            "max_loras_per_batch",
        ),
        _set_by("learner.lora"),
    ),
    **dict.fromkeys(
        ("load_format", "skip_tokenizer_init", "grammar_backend", "host", "port", "device", "base_gpu_id"), _OURS
    ),
    **dict.fromkeys(
        (
            "json_model_override_args",
            "quantization",
            "quantization_param_path",
            "modelopt_quant",
            "quantize_and_serve",
            "rl_quant_profile",
        ),
        _ANOTHER,
    ),
    **dict.fromkeys(("preferred_sampling_params", "enable_watermark", "watermark_config"), _DRAWS),
    "enable_return_routed_experts": "only vLLM's experts are carried along: rollout.vllm.routed_experts",
    # A file of arguments.
    "config": "give its arguments here",
    "tokenizer_worker_num": "such a server takes no key, and all users of its host could call it",
    **dict.fromkeys(("pp_size", "pp", "pipeline_parallel_size"), "use rollout.sglang.tensor_parallel"),
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr", "nccl_init_addr"), _ONE_HOST),
}


def checked(refused: Mapping[str, str], options: dict[str, Any]) -> dict[str, Any]:
    """The options, checked: none is set that may not be.

    Args:
        refused: `VLLM` or `SGLANG`.
        options: by name, as written.

    Raises:
        ValueError: names each with its reason.
    """
    nameless = [name for name in options if _NAME.fullmatch(name) is None]
    if nameless:
        # On a command line it could be a value too, or two arguments.
        raise ValueError(f"{nameless[0]!r} is no name of an engine argument: letters, digits, _ and -")
    wrong = [f"{name}: {why}" for name in options if (why := _why(refused, name.lstrip("-").replace("-", "_")))]
    if wrong:
        raise ValueError("; ".join(wrong))
    return options


def _why(refused: Mapping[str, str], name: str) -> str | None:
    if refused is SGLANG:
        # Its server takes the beginning of a name for the name.
        return refused.get(name) or next((why for full, why in refused.items() if full.startswith(name)), None)
    return refused.get(name)
