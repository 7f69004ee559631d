"""Megatron's model, built from a Hugging Face configuration, without weights: a chunk for each part of the stage.

Transformer Engine's layers on CUDA, Megatron's own on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.megatron.computing.heads import ResultHead
from rollmesh.learner.engines.megatron.families.family import Settings
from rollmesh.learner.engines.megatron.parallel import ParallelPlace, ParallelSizes

MakeHead = Callable[[Any, ProcessGroupCollection], ResultHead]
"""From Megatron's output layer and its groups to the layer that takes its place."""
# Rows of the vocabulary come in multiples of it in each process.
_ROWS = 128


def padded_vocabulary(tokens: int, sizes: ParallelSizes) -> int:
    """Rows of the embedding with padding: each process has as many, a multiple of what products like."""
    return -(-tokens // (_ROWS * sizes.tp)) * _ROWS * sizes.tp


def build_config(spec: EngineSpec, settings: Settings, sizes: ParallelSizes, device: torch.device) -> TransformerConfig:
    """Megatron's configuration of all layers.

    Args:
        spec: of the engine.
        settings: of the model.
        sizes: of the divisions.
        device: of the model.
    """
    cuda = device.type == "cuda"
    dtype: torch.dtype = getattr(torch, spec.param_dtype)
    experts = "num_moe_experts" in settings.transformer
    arguments = dict(settings.transformer)
    if experts:
        arguments |= {
            "moe_grouped_gemm": cuda,
            # Losses of routers are not Megatron's, see `routers`.
            "moe_router_load_balancing_type": "none",
        }
    if spec.activation_checkpointing == "selective":
        modules = [_recomputed(experts=experts, cuda=cuda)]
        arguments |= {"recompute_granularity": "selective", "recompute_modules": modules}
    elif spec.activation_checkpointing and spec.optimizer is not None:
        arguments |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    interleaved = sizes.vpp > 1
    return TransformerConfig(
        **arguments,
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        virtual_pipeline_model_parallel_size=sizes.vpp if interleaved else None,
        pipeline_model_parallel_layout=_pipeline_layout(sizes) if sizes.pp > 1 else None,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        sequence_parallel=sizes.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Marks divided parameters, which the norm of the gradient counts on; weights come from the files.
        perform_initialization=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        use_cpu_initialization=not cuda,
        # The only one for micro-batches of several lengths; also asked for without experts.
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - no password
        # Gradients are sums: neither the schedule nor the data-parallel reduction divides them.
        calculate_per_token_loss=True,
        # Batched exchanges of two stages that are each other's neighbours on both sides mix up their tensors.
        batch_p2p_comm=not interleaved,
        overlap_p2p_comm=interleaved,
        variable_seq_lengths=sizes.pp > 1 and not interleaved,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=cuda,
        bias_dropout_fusion=cuda,
        masked_softmax_fusion=False,
        apply_rope_fusion=cuda,
        cp_comm_type="p2p" if cuda and sizes.cp > 1 else None,
    )


def build_chunks(
    config: TransformerConfig,
    settings: Settings,
    vocabulary: int,
    sizes: ParallelSizes,
    place: ParallelPlace,
    make_head: MakeHead,
    device: torch.device,
    padding_id: int | None,
    *,
    adapted: bool = False,
) -> list[GPTModel]:
    """This process's parts of the model, in the order in which tokens pass them.

    Args:
        config: of the layers.
        settings: of the model.
        vocabulary: rows of the embedding, padded.
        sizes, place: of the process.
        make_head: of the last part's output layer.
        device: of the parameters.
        padding_id: a token whose embedding is not trained, as in transformers; None: there is none.
        adapted: layers get adapters, which read what the layers read.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = []
    for part in range(sizes.vpp):
        stage = part if sizes.vpp > 1 else None
        block = get_gpt_decoder_block_spec(
            config, use_transformer_engine=device.type == "cuda", normalization="RMSNorm", vp_stage=stage
        )
        if device.type == "cpu":
            _use_local_layers(block, norms_of_heads=config.qk_layernorm)
        elif adapted:
            _separate_norms(block)
        first = place.pp == 0 and part == 0
        last = place.pp == sizes.pp - 1 and part == sizes.vpp - 1
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=block,
            vocab_size=vocabulary,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            vp_stage=stage,
            **settings.model,
        )
        if first and padding_id is not None:
            hook = _PaddingHook(padding_id, groups.tp, sequence_parallel=sizes.sequence_parallel)
            chunk.embedding.register_forward_hook(hook, with_kwargs=True)
        if last:
            chunk.output_layer = make_head(chunk.output_layer, groups)
        chunks.append(chunk)
    return chunks


def head_of(chunks: list[GPTModel]) -> ResultHead | None:
    """The last layer, where this process has it."""
    head: ResultHead | None = chunks[-1].output_layer if chunks[-1].post_process else None
    return head


def named_parameters(chunks: list[GPTModel]) -> dict[tuple[int, str], nn.Parameter]:
    """Parameters by the number of their chunk and Megatron's name, each once."""
    return {(part, name): value for part, chunk in enumerate(chunks) for name, value in chunk.named_parameters()}


class _PaddingHook:
    """Lets no gradient into the embedding of one token."""

    def __init__(self, token: int, group: dist.ProcessGroup, *, sequence_parallel: bool) -> None:
        self._token, self._group, self._sequence_parallel = token, group, sequence_parallel

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Tensor], states: Tensor) -> Tensor:
        """Gives the states [t, 1, H], or this process's part of the t."""
        del module, args
        fixed = (kwargs["input_ids"] == self._token).T[..., None]
        if self._sequence_parallel:
            fixed = fixed.chunk(self._group.size())[self._group.rank()]
        return torch.where(fixed, states.detach(), states)


def _leave(tensor: Tensor) -> Tensor:
    return tensor


def _recomputed(*, experts: bool, cuda: bool) -> str:
    """Megatron's name of the cheap part of a layer; experts that are computed one by one have none."""
    if not experts:
        return "mlp"
    return "moe_act" if cuda else "moe"


def _pipeline_layout(sizes: ParallelSizes) -> list[list[str]]:
    """Layers of each part in Megatron's words, with the embedding before and the loss after them."""
    parts = [["decoder"] * count for count in sizes.layers]
    parts[0].insert(0, "embedding")
    parts[-1].append("loss")
    return parts


def _use_local_layers(block: Any, *, norms_of_heads: bool) -> None:
    from rollmesh.learner.engines.megatron.local.layers import LocalAttention, LocalRMSNorm

    block.layer_norm = LocalRMSNorm
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = LocalRMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = LocalAttention
        if norms_of_heads:
            attention.q_layernorm = attention.k_layernorm = LocalRMSNorm


def _separate_norms(block: Any) -> None:
    """Has norms computed apart from the products that follow them, so that a layer's input can be seen."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TENorm,
    )

    for layer in block.layer_specs:
        parts = layer.submodules
        attention, mlp = parts.self_attention.submodules, parts.mlp.submodules
        if attention.linear_qkv is TELayerNormColumnParallelLinear:
            attention.linear_qkv, parts.input_layernorm = TEColumnParallelLinear, TENorm
        if getattr(mlp, "linear_fc1", None) is TELayerNormColumnParallelLinear:
            mlp.linear_fc1, parts.pre_mlp_layernorm = TEColumnParallelLinear, TENorm
