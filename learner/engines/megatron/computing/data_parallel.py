"""Chunks whose gradients travel between data-parallel ranks, in buffers of Megatron's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from rollmesh.learner.engines.interface import EngineSpec


def wrap_chunks(
    chunks: Sequence[GPTModel], config: TransformerConfig, spec: EngineSpec
) -> list[DistributedDataParallel]:
    """Chunks whose gradients are summed over data-parallel ranks."""
    wrapped = [
        DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=spec.megatron.overlap_grad_reduce,
                overlap_param_gather=spec.megatron.overlap_param_gather,
                use_distributed_optimizer=True,
                check_for_nan_in_grad=False,
            ),
            chunk,
            # Only the first chunk's gradients arise last, with nothing left to hide their exchange.
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(chunks)
    ]
    if spec.megatron.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
    for group in (group for chunk in wrapped for group in bucket_groups(chunk)):
        # All are sent for after the optimizer's step, not each when the one before has come.
        group.next_param_gather_bucket_group = None
    return wrapped


def bucket_groups(chunk: DistributedDataParallel) -> list[Any]:
    """Megatron's groups of buckets, which travel together."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
