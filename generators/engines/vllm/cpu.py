"""What vLLM needs on a CPU in addition; never imported on CUDA.

Invariant: the compute threads of all its workers together are those that this generator was given. vLLM's own binding
of threads to cores is off: it gives every engine of a host the same cores.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def prepare(*, threads: int, workers: int, eager: bool) -> None:
    """Sets the environment that vLLM's processes inherit; before vLLM is imported.

    Args:
        threads: compute threads of all workers together.
        workers: how many there are.
        eager: nothing is to be compiled.
    """
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["OMP_NUM_THREADS"] = str(max(1, threads // workers))
    if eager:
        # A few small functions of the sampler would be compiled even so, at the first request, for 10 to 20 seconds.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def repack_tied(model: nn.Module) -> None:
    """Packs the output layer anew where it is tied to the embedding; in a worker, after a reload.

    On a CPU it computes with a packed copy, and vLLM's reload does not know that the copy is one of new weights.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = {
        module.weight.data_ptr()
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    }
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and module.weight.data_ptr() in embeddings:
            module.quant_method.process_weights_after_loading(module)
