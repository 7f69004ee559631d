"""Masks and scores of tokens x tokens are named before they are paid for, and refused where they are too large."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import Packing, Segments
from rollmesh.learner.engines.fsdp2 import attention_calls
from rollmesh.learner.engines.fsdp2.attention import packed_attention
from rollmesh.learner.engines.fsdp2.attention_calls import build_layout
from rollmesh.learner.engines.fsdp2.exact_attention_limits import describe_dense_attention, refuse_long_masks
from rollmesh.learner.engines.fsdp2.opaque import Opaque
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines import two_ranks
from tests.learner.engines.models import make_engine, make_sequences
from tests.learner.engines.training import log_probs

torch.set_num_threads(1)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def describe(device: torch.device, dtype: torch.dtype, longest: int | None, packing: Packing = Packing.SHARED) -> str:
    return describe_dense_attention(packing, "eager", device, dtype, 32, longest)


def test_masks_are_named_with_what_would_do_without_them():
    assert "install flash-attn" in describe(CUDA, torch.bfloat16, 16384)
    assert "learner.param_dtype" in describe(CUDA, torch.float32, None)
    assert describe(CPU, torch.float32, 4096) == ""
    assert "shorten rollout.max_prompt_tokens" in describe(CPU, torch.float32, 4097)


def test_a_cap_on_scores_is_named_with_the_memory_of_all_heads():
    said = describe_dense_attention(Packing.SHARED, "eager", CUDA, torch.bfloat16, 16, 8192, capped=True)
    assert "with a cap on scores" in said
    assert "8.2 GiB a layer" in said
    assert "install flash-attn, or set learner.attention: flex" in said
    unknown = describe_dense_attention(Packing.SHARED, "eager", CUDA, torch.bfloat16, 16, None, capped=True)
    assert "scores of heads x tokens x tokens, and is slow" in unknown
    with pytest.raises(ConfigError, match="with a cap on scores"):
        refuse_long_masks(Packing.SHARED, CUDA, torch.bfloat16, 16385, capped=True)


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_of_longer_sequences_are_refused(device, dtype):
    with pytest.raises(ConfigError, match="up to 16385 tokens"):
        refuse_long_masks(Packing.SHARED, device, dtype, 16385)
    refuse_long_masks(Packing.SHARED, device, dtype, 16384)
    refuse_long_masks(Packing.ROWS, device, dtype, 16385)


def test_scores_of_eager_attention_are_named():
    assert describe(CUDA, torch.bfloat16, 2048, Packing.ROWS) == ""
    assert "8.0 GiB for a sequence of 8192 tokens" in describe(CUDA, torch.bfloat16, 8192, Packing.ROWS)
    assert describe_dense_attention(Packing.ROWS, "sdpa", CUDA, torch.bfloat16, 32, 1 << 20) == ""


def test_a_sequence_that_no_one_announced_is_refused_too(model_folder, monkeypatch):
    engine = make_engine(model_folder)
    batch = pack(make_sequences(1))
    expected = log_probs(engine, batch)
    monkeypatch.setattr(attention_calls, "LONGEST_MASKED", 10)
    with pytest.raises(DataError, match="keep sequences within 10 tokens"):
        log_probs(engine, batch)
    monkeypatch.undo()
    assert torch.equal(log_probs(engine, batch), expected)


def test_masks_of_a_call_are_together_no_larger_than_that_of_the_longest_sequence(monkeypatch):
    """However many segments of one shape there are; a segment that is too long by itself has a call of its own."""
    monkeypatch.setattr(attention_calls, "LONGEST_MASKED", 20)
    lengths = np.array([2, *[6] * 40, 30])
    starts = lengths.cumsum() - lengths
    segments = Segments(starts, lengths, np.zeros(42, dtype=np.int64), np.where(np.arange(42), 2, 0))
    calls = build_layout(segments, CPU).calls
    assert sum(call.shape[0] for call in calls) == 42
    assert sorted(call.shape for call in calls if np.prod(call.shape) > 400) == [(1, 30, 32)]
    assert len(calls) < 12


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_capped_scores_need_a_mask_where_others_need_none(monkeypatch, softcap):
    """One that is bounded as any other."""
    monkeypatch.setattr(attention_calls, "LONGEST_MASKED", 10)
    nothing = np.zeros(1, dtype=np.int64)
    layout = Opaque(build_layout(Segments(nothing, nothing + 20, nothing, nothing), CPU))
    tokens = torch.randn(1, 2, 20, 4)
    refused = pytest.raises(DataError, match="keep sequences within 10 tokens") if softcap else nullcontext()
    with refused:
        packed_attention(nn.Identity(), tokens, tokens, tokens, None, softcap=softcap, layout=layout)


def test_ranks_refuse_a_long_sequence_together_before_they_compute(engine_worlds, model_folder):
    """Though one of them has it alone; the step can be given up, and the next one is trained."""
    first, second = engine_worlds(EngineLayout("two_ranks", processes=2)).run(
        two_ranks.refuse_long_sequence, model_folder
    )
    assert all("keep sequences within 20 tokens" in told for told in first[0])
    assert first == second


def test_an_engine_says_so_at_its_start(model_folder, caplog):
    make_engine(model_folder, longest=8192)
    assert "no kernel for packed attention in torch.float32 on cpu" in caplog.text
    with pytest.raises(ConfigError, match="up to 20000 tokens"):
        make_engine(model_folder, longest=20000)
