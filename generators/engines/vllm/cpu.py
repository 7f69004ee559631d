"""Settings of vLLM on a CPU; never imported on CUDA.

Invariant: the compute threads of all its workers together are those that this generator was given. The binding of
threads to cores by vLLM is off: it gives every engine of a host the same cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollmesh.generators.engines.vllm.engine_args import THREADS_BINDING, UNBOUND, binds_threads
from rollmesh.generators.engines.vllm.plugin import FORKS_WORKERS

if TYPE_CHECKING:
    from torch import nn


def prepare(*, threads: int, workers: int, eager: bool) -> None:
    """Sets the environment that vLLM's processes inherit; before vLLM is imported.

    Args:
        threads: compute threads of all workers together.
        workers: how many there are.
        eager: nothing is to be compiled.
    """
    os.environ.setdefault(THREADS_BINDING, UNBOUND)
    os.environ["OMP_NUM_THREADS"] = str(max(1, threads // workers))
    if not binds_threads():
        os.environ[FORKS_WORKERS] = "1"
    if eager:
        # A few small functions of the sampler would be compiled even so, at the first request, for 10 to 20 seconds.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


@contextmanager
def packing(model: nn.Module) -> Iterator[None]:
    """Around a reload, in a worker: packs layers that compute with packed weights and that vLLM's reload does not
    pack."""
    with _packing_experts(model):
        yield
    _pack_tied(model)


@contextmanager
def _packing_experts(model: nn.Module) -> Iterator[None]:
    """The experts of a mixture: vLLM packs them where it sets their kernel up, which a reload does not do again.

    The kernel would read the new weights as if they were packed.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    kernels = {module: module.moe_kernel for module in model.modules() if isinstance(module, UnquantizedFusedMoEMethod)}
    for method in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        # Layers for which nothing came have the former weights, which are packed.
        for method, kernel in kernels.items():
            if method.moe_kernel is None:
                method.moe_kernel = kernel


def _pack_tied(model: nn.Module) -> None:
    """The output layer, where it is tied to the embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = {
        module.weight.data_ptr()
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    }
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.data_ptr() in embeddings:
            module.quant_method.process_weights_after_loading(module)
