"""Packed log-probs are those of a plain forward pass per sequence, for every architecture."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import TrainSequence
from tests.learner.engines.models import ARCHITECTURES, make_engine, make_model, make_sequences
from tests.learner.engines.training import log_probs

torch.set_num_threads(1)


def plain_log_probs(folder, sequences: list[TrainSequence]) -> torch.Tensor:
    """One eager forward pass per sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    results = []
    for sequence in sequences:
        ids = torch.from_numpy(np.concatenate([sequence.prompt_ids, sequence.response_ids])).long()
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0].float() / sequence.temperature
        prompt = len(sequence.prompt_ids)
        per_token = torch.log_softmax(logits, -1)[prompt - 1 : -1].gather(1, ids[prompt:, None])[:, 0]
        results.append(per_token[torch.from_numpy(sequence.response_mask.astype(bool))])
    return torch.cat(results)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_log_probs_agree_with_plain_forward(tmp_path, architecture):
    folder = make_model(tmp_path / "model", architecture)
    sequences = make_sequences(1)
    packed = log_probs(make_engine(folder), pack(sequences))
    torch.testing.assert_close(packed, plain_log_probs(folder, sequences), atol=1e-5, rtol=1e-5)


def test_temperatures_apply_per_sequence(tmp_path):
    folder = make_model(tmp_path / "model", "qwen3")
    sequences = [
        dataclasses.replace(sequence, temperature=temperature)
        for sequence, temperature in zip(make_sequences(2), [0.5, 1.0, 1.7] * 4, strict=True)
    ]
    packed = log_probs(make_engine(folder), pack(sequences))
    torch.testing.assert_close(packed, plain_log_probs(folder, sequences), atol=1e-5, rtol=1e-5)


def test_long_and_short_sequences_together(tmp_path):
    folder = make_model(tmp_path / "model", "gemma3_text")
    sequences = make_sequences(3, groups=2, longest=50) + make_sequences(4, groups=3, longest=2)
    packed = log_probs(make_engine(folder), pack(sequences))
    torch.testing.assert_close(packed, plain_log_probs(folder, sequences), atol=1e-5, rtol=1e-5)


def test_sequences_without_trained_tokens_are_harmless(tmp_path):
    folder = make_model(tmp_path / "model", "llama")
    silent = dataclasses.replace(make_sequences(5)[0], response_mask=np.zeros_like(make_sequences(5)[0].response_mask))
    sequences = [silent, *make_sequences(6), silent]
    engine = make_engine(folder)
    together, alone = engine.infer([pack(sequences), pack([silent])])
    torch.testing.assert_close(together.log_probs, plain_log_probs(folder, sequences), atol=1e-5, rtol=1e-5)
    assert [field.shape for field in alone.policy()] == [(0,), (0,)]
