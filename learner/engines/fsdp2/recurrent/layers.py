"""Recurrent layers of transformers' models, found and made to compute the sequences of a packed row apart.

All else of such a model computes each packed token once. A recurrent layer gets the sequences gathered, and its output
is scattered to the packed tokens. Every copy of a prompt gives the same output, so one of them is taken.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rollmesh.learner.engines.fsdp2.opaque import Opaque
from rollmesh.learner.engines.fsdp2.preparation.blocks import transformer_blocks
from rollmesh.learner.engines.fsdp2.recurrent.layout import RecurrentLayout

LAYOUT = "recurrent_layout"
"""The keyword under which a model's forward hands the layout through to its layers."""


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that carry state from token to token: children of the blocks that hold a convolution over tokens."""
    return [
        child
        for block in transformer_blocks(model)
        for child in block.children()
        if any(isinstance(part, nn.Conv1d) for part in child.children())
    ]


def compute_apart(layer: nn.Module) -> None:
    """Makes a layer compute the sequences of a packed row apart wherever its caller gives a layout."""
    alone: Callable[..., Tensor] = layer.forward

    @functools.wraps(alone)
    def forward(hidden_states: Tensor, *args: Any, **others: Any) -> Tensor:
        passed: Opaque[RecurrentLayout] | None = others.pop(LAYOUT, None)
        if passed is None:
            return alone(hidden_states, *args, **others)
        layout = passed.value
        # That of attention.
        others.pop("layout", None)
        packed = hidden_states.squeeze(0)
        outputs = [
            # An embedding look-up is a gather with a fast backward; see `attention`.
            alone(functional.embedding(call.tokens, packed), *args, **others, **call.boundaries).flatten(0, 1)
            for call in layout.calls
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return functional.embedding(layout.places, output)[None]

    # The module itself stays, and so do its parameters' names.
    layer.forward = forward


def kernels_separate_sequences(layers: Sequence[nn.Module]) -> bool:
    """True where the layers run in kernels that keep the sequences of a row apart, as transformers itself says.

    Its functions for these layers are kernels of other packages (flash-linear-attention, mamba-ssm, causal-conv1d)
    where these are installed; else they are its own, which refuse boundaries.
    """
    functions = {function for layer in layers for function in _functions_of(type(layer))}
    return bool(functions) and all(_accepts_boundaries(function) for function in functions)


def _functions_of(kind: type[nn.Module]) -> list[Callable[..., Any]]:
    """The functions of its module that a layer calls, those which transformers may replace by kernels."""
    names = inspect.unwrap(kind.forward).__code__.co_names
    found = (getattr(sys.modules[kind.__module__], name, None) for name in names)
    return [function for function in found if inspect.isfunction(function) and hasattr(function, "__wrapped__")]


def _accepts_boundaries(function: Callable[..., Any]) -> bool:
    try:
        function(cu_seqlens=True, seq_idx=True)
    except ValueError:
        return False
    except TypeError:
        # Past the refusal: a kernel that lacks its other arguments.
        return True
    return False
