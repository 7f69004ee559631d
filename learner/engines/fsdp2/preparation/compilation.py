"""Compilation of a model's layers (`torch.compile`), each by itself and all by the same code.

Attention is left out: the layout of a batch decides what it calls. So a layer is compiled in two parts, before and
after it. The number of tokens is a variable of the compiled code, and layers of a class share it. So every model has a
few graphs, whatever its depth and its batches.

A layer's method is compiled, not the layer. So what wraps layers, recomputation and FSDP's hooks, stays outside, and
parameters keep their names.
"""

from __future__ import annotations

import torch
from torch import nn

from rollmesh.learner.engines.fsdp2.preparation.blocks import transformer_blocks

_BACKEND = "inductor"
# Engines of several roles, with and without gradient and in several dtypes, share the code of a class of layers. Beyond
# its limit torch stops compiling.
_VARIANTS = 64


class CompiledLayers:
    """The layers of a model, compiled at choice.

    Args:
        model: before it is prepared for training.
    """

    def __init__(self, model: nn.Module) -> None:
        self._compiled = [
            (block, torch.compile(block.forward, dynamic=True, backend=_BACKEND)) for block in transformer_blocks(model)
        ]
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)

    def use(self, compiled: bool) -> None:
        """Computes with compiled layers from now on, or with transformers' own code."""
        for block, forward in self._compiled:
            vars(block).pop("forward", None)
            if compiled:
                block.forward = forward
