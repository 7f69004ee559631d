"""FlashAttention 2 and 3, as transformers loads them, get segments and contexts that give the exact log-probs.

Their packages need CUDA, so a function with their interface stands in: a loop over segments, as their documentation
defines them.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import SimpleNamespace

import pytest
import torch
from transformers import modeling_flash_attention_utils

from rollmesh.learner.batching.pack import pack
from tests.learner.engines.models import make_engine, make_model, make_sequences
from tests.learner.engines.training import log_probs

torch.set_num_threads(1)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
):
    """Causal attention of each segment, aligned at its last key; [N, H, D]."""
    outputs = []
    queries, keys = (torch.split(x, c.diff().tolist()) for x, c in ((q, cu_seqlens_q), (k, cu_seqlens_k)))
    assert causal
    for one, context, values in zip(queries, keys, torch.split(v, cu_seqlens_k.diff().tolist()), strict=True):
        assert len(one) <= max_seqlen_q
        assert len(context) <= max_seqlen_k
        context, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (context, values))
        scores = torch.einsum("qhd,khd->hqk", one, context) * softmax_scale
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        last = torch.arange(len(one))[:, None] + len(context) - len(one)
        place = torch.arange(len(context))
        seen = (place <= last) & ((window_size[0] < 0) | (place >= last - window_size[0]))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("kernel", "package"), [("flash_attention_2", "flash_attn"), ("flash_attention_3", "flash_attn_interface")]
)
def test_log_probs_are_those_of_the_exact_calls(tmp_path, monkeypatch, kernel, package):
    installed = module_from_spec(ModuleSpec(package, None))
    vars(installed).update(dict.fromkeys(("flash_attn_func", "flash_attn_with_kvcache")))
    installed.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, package, installed)
    monkeypatch.setitem(sys.modules, f"{package}.bert_padding", SimpleNamespace(pad_input=None, unpad_input=None))
    monkeypatch.setattr(modeling_flash_attention_utils, f"is_flash_attn_{kernel[-1]}_available", lambda: True)
    # Names under which transformers keeps a kernel that it has loaded.
    for name in [name for name in vars(modeling_flash_attention_utils) if name.endswith("_fn")]:
        monkeypatch.setattr(modeling_flash_attention_utils, name, None)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    engine = make_engine(make_model(tmp_path / "model", "gemma2"))
    batch = pack(make_sequences(1))
    exact = log_probs(engine, batch)
    engine._runner._kernel = kernel
    torch.testing.assert_close(log_probs(engine, batch), exact, atol=1e-5, rtol=1e-5)
