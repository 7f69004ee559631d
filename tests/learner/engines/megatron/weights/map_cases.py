"""Tiny models of every family, all divisions of them, and Megatron's tensors cut from full ones by other means.

`expected_local` is the truth for the weight map. It cuts and joins whole tensors as Megatron's layers do, and shares
nothing with the map's boxes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from rollmesh.learner.engines.megatron.families.registry import family_of
from rollmesh.learner.engines.megatron.parallel import ParallelPlace, ParallelSizes
from rollmesh.learner.engines.megatron.weights.weight_map import ParameterKey, WeightMap

LAYERS = 5
_SMALL = {
    "vocab_size": 45,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    # Not hidden_size / num_attention_heads.
    "head_dim": 6,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"head_dim": 2},
    "qwen3": {},
    "qwen3_moe": {
        "moe_intermediate_size": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        # Layers 0 and 2 alone have experts.
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1, 3, 4],
    },
    "mixtral": {"num_local_experts": 8},
}
"""Settings by family."""


def make_config(kind: str, *, tied: bool = False, **changes: Any) -> PreTrainedConfig:
    """The configuration of a tiny model."""
    return AutoConfig.for_model(kind, **_SMALL | KINDS[kind] | {"tie_word_embeddings": tied} | changes)


def describe(config: PreTrainedConfig) -> dict[str, Tensor]:
    """The model's parameters without memory."""
    with torch.device("meta"):
        return dict(AutoModelForCausalLM.from_config(config).named_parameters())


def make_map(
    config: PreTrainedConfig, sizes: ParallelSizes, padded_vocab: int = 48, *, value_model: bool = False
) -> WeightMap:
    """The weight map of a model."""
    return WeightMap(family_of(config), config, sizes, describe(config), padded_vocab, value_model=value_model)


def full_tensors(weights: WeightMap) -> dict[str, Tensor]:
    """A value of its own for each element of the model."""
    found, start = {}, 1
    for full in weights.full_tensors():
        count = torch.Size(full.shape).numel()
        found[full.name] = torch.arange(start, start + count, dtype=torch.float64).view(full.shape)
        start += count
    return found


@st.composite
def divisions(draw: st.DrawFn) -> ParallelSizes:
    """Sizes that divide every tiny model, with layers divided at random, also so that a part has none."""
    tp, cp, etp = (draw(st.sampled_from(choice)) for choice in ((1, 2, 4), (1, 2), (1, 2, 4)))
    pp, ep = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2, 4)))
    vpp = draw(st.sampled_from((1, 2))) if pp > 1 else 1
    cuts = sorted(draw(st.lists(st.integers(0, LAYERS), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
    layers = tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, LAYERS], strict=True))
    processes = pp * lcm(tp * cp, etp * ep) * draw(st.sampled_from((1, 2)))
    return ParallelSizes(processes, tp, pp, vpp, cp, ep, etp, layers=layers)


def is_sparse(config: Any, layer: int) -> bool:
    """The layer has experts."""
    return config.model_type == "mixtral" or (config.model_type == "qwen3_moe" and layer in (0, 2))


def megatron_names(
    config: Any, sizes: ParallelSizes, place: ParallelPlace, *, engine: bool = False, value_model: bool = False
) -> list[ParameterKey]:
    """The names of a process's parameters, as `GPTModel` gives them.

    Args:
        config: of the model.
        sizes, place: of the process.
        engine: its layers are Transformer Engine's.
        value_model: the model has a scalar head.
    """
    tied = config.tie_word_embeddings and not value_model
    found: list[ParameterKey] = []
    for part in range(sizes.vpp):
        first = place.pp == 0 and part == 0
        last = place.pp == sizes.pp - 1 and part == sizes.vpp - 1
        names = ["embedding.word_embeddings.weight"] * first
        for index, layer in enumerate(sizes.layers_of(place.pp, part)):
            sparse = is_sparse(config, layer)
            own = ["self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"]
            own += ["self_attention.linear_qkv.bias"] * (config.model_type == "qwen2")
            if config.model_type.startswith("qwen3"):
                own += ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"]
            own.append("self_attention.linear_qkv.layer_norm_weight" if engine else "input_layernorm.weight")
            own.append("mlp.linear_fc1.layer_norm_weight" if engine and not sparse else "pre_mlp_layernorm.weight")
            kinds = ["linear_fc1", "linear_fc2"]
            if sparse:
                experts = range(config.num_experts // sizes.ep)
                form = "mlp.experts.{k}.weight{e}" if engine else "mlp.experts.local_experts.{e}.{k}.weight"
                own += [form.format(k=kind, e=expert) for kind in kinds for expert in experts]
                own.append("mlp.router.weight")
            else:
                own += [f"mlp.{kind}.weight" for kind in kinds]
            names += [f"decoder.layers.{index}.{name}" for name in own]
        if last:
            names.append("decoder.final_layernorm.weight")
            names += ["output_layer.weight"] * (not tied or not first) + ["output_layer.bias"] * value_model
        found += [(part, name) for name in names]
    return found


def expected_local(
    config: Any, sizes: ParallelSizes, place: ParallelPlace, key: ParameterKey, full: Mapping[str, Tensor], padded: int
) -> Tensor:
    """A process's tensor, cut from the full ones."""
    part, name = key

    def cut(tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(sizes.tp, dim)[place.tp]

    def vocabulary(tensor: Tensor) -> Tensor:
        return cut(torch.cat([tensor, tensor.new_zeros(padded - len(tensor), tensor.shape[1])]), 0)

    if name == "embedding.word_embeddings.weight":
        return vocabulary(full["model.embed_tokens.weight"])
    if name == "decoder.final_layernorm.weight":
        return full["model.norm.weight"]
    if name.startswith("output_layer."):
        if (head := f"value_head.{name.rpartition('.')[2]}") in full:
            return full[head]
        return vocabulary(full["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"])
    _, _, index, *rest = name.split(".")
    own = f"model.layers.{sizes.layers_of(place.pp, part)[int(index)]}."
    if "experts" in rest:
        local = int(rest[3] if rest[2] == "local_experts" else rest[-1].removeprefix("weight"))
        expert = place.ep * (config.num_experts // sizes.ep) + local
        if "linear_fc2" in rest:
            return full[f"{own}mlp.experts.down_proj"][expert].chunk(sizes.etp, 1)[place.etp]
        halves = full[f"{own}mlp.experts.gate_up_proj"][expert].chunk(2)
        return torch.cat([half.chunk(sizes.etp)[place.etp] for half in halves])
    match ".".join(rest):
        case "self_attention.linear_qkv.weight" | "self_attention.linear_qkv.bias":
            joined = [full[f"{own}self_attn.{kind}_proj.{rest[-1]}"] for kind in "qkv"]
            groups = config.num_key_value_heads
            by_group = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in joined]
            return cut(torch.cat(by_group, 1).flatten(0, 1), 0)
        case "self_attention.linear_proj.weight":
            return cut(full[f"{own}self_attn.o_proj.weight"], 1)
        case "self_attention.q_layernorm.weight" | "self_attention.k_layernorm.weight":
            return full[f"{own}self_attn.{rest[1][0]}_norm.weight"]
        case "input_layernorm.weight" | "self_attention.linear_qkv.layer_norm_weight":
            return full[f"{own}input_layernorm.weight"]
        case "pre_mlp_layernorm.weight" | "mlp.linear_fc1.layer_norm_weight":
            return full[f"{own}post_attention_layernorm.weight"]
        case "mlp.router.weight":
            return full[f"{own}mlp.gate.weight"]
        case "mlp.linear_fc1.weight":
            return torch.cat([cut(full[f"{own}mlp.{kind}_proj.weight"], 0) for kind in ("gate", "up")])
        case "mlp.linear_fc2.weight":
            return cut(full[f"{own}mlp.down_proj.weight"], 1)
    raise KeyError(name)
