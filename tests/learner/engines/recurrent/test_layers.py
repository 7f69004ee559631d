"""Recurrent layers of hybrid models in packed rows: by transformers' own code, and by kernels that know boundaries."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from benchmarks.learner.tiny_models import save_model
from rollmesh.learner.batching.types import Packing
from rollmesh.learner.engines.fsdp2.recurrent.layers import kernels_separate_sequences, recurrent_layers
from tests.learner.engines.models import make_engine

torch.set_num_threads(1)
_CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")


@pytest.mark.parametrize("architecture", ["qwen3_next", "granitemoehybrid"])
def test_boundaries_reach_the_functions_of_transformers_which_refuse_them_without_kernels(tmp_path, architecture):
    save_model(tmp_path, architecture)
    engine = make_engine(tmp_path)
    assert not kernels_separate_sequences(recurrent_layers(engine._runner.transformer))
    engine._runner._kernels_separate_sequences = True
    engine.probe()
    assert engine.packing is Packing.ROWS
    assert "can't keep packed sequences apart without" in engine._runner.why_rows


def test_kernels_that_separate_sequences_get_all_sequences_in_one_row(tmp_path, monkeypatch):
    save_model(tmp_path, "lfm2")
    engine = make_engine(tmp_path, activation_checkpointing="selective")
    layers = [layer for layer in engine._runner.transformer.modules() if isinstance(layer, Lfm2ShortConv)]
    assert engine.cost.stateful == sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() > 1)
    module = sys.modules[Lfm2ShortConv.__module__]
    shapes = set()

    def with_boundaries(hidden, weight, bias=None, activation=None, seq_idx=None):
        """The convolution as its definition says: a sum over the tokens before, of the same sequence."""
        shapes.add(hidden.shape[0] if seq_idx is not None else None)
        width = weight.shape[-1]
        owner = torch.zeros_like(hidden[:, 0], dtype=torch.int32) if seq_idx is None else seq_idx
        total = torch.zeros_like(hidden)
        for back in range(width):
            before = functional.pad(hidden, (back, 0))[..., : hidden.shape[-1]]
            same = functional.pad(owner, (back, 0), value=-1)[..., : owner.shape[-1]] == owner
            total = total + before * same[:, None] * weight[:, width - 1 - back, None]
        return total if bias is None else total + bias[:, None]

    # As transformers looks for the kernels of the package.
    monkeypatch.setitem(sys.modules, "causal_conv1d", SimpleNamespace(**dict.fromkeys(_CONVOLUTIONS, with_boundaries)))
    for name in _CONVOLUTIONS:
        choose = use_kernel_func_from_hub_with_fallback(name, "causal_conv1d")
        monkeypatch.setattr(module, name, choose(getattr(module, name).__wrapped__))
    assert kernels_separate_sequences(layers)
    engine._runner._kernels_separate_sequences = True
    evidence = engine.probe()
    assert engine.packing is Packing.REPEATED
    assert evidence.truth.larger() < 1e-5
    assert shapes == {None, 1}
