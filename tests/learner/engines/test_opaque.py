"""FSDP passes on what a micro-batch brings as it is: layouts keep their masks, temperatures their dtype."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from benchmarks.learner import tiny_models
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.engines.fsdp2.attention_calls import AttentionCall
from rollmesh.learner.engines.fsdp2.kernels.flex import FlexLayout
from tests.learner.engines.models import make_engine, make_sequences
from tests.learner.engines.training import log_probs, train_step

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def windows_folder(tmp_path_factory: pytest.TempPathFactory):
    """Layers of two kinds: with a window, and without."""
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    return tiny_models.save_model(tmp_path_factory.mktemp("models"), "gemma2", **layers)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_mask_is_built_once_for_all_layers_of_a_kind(windows_folder, monkeypatch, dtype):
    built: list[tuple[int, int | None]] = []
    build = AttentionCall._build

    def noted(call: AttentionCall, rows: int, columns: int, reach: int | None, dtype: torch.dtype) -> Any:
        built.append((call.queries.data_ptr(), reach))
        return build(call, rows, columns, reach, dtype)

    monkeypatch.setattr(AttentionCall, "_build", noted)
    # Float32 as the probe has it, sharded as well.
    engine = make_engine(windows_folder, param_dtype="bfloat16", activation_checkpointing=True)
    with engine._runner.in_float32() if dtype == "float32" else nullcontext():
        train_step(engine, seed=1, token_budget=1 << 20)
    assert len({reach for _, reach in built}) == 2
    assert len(built) == len(set(built))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)])
def test_a_block_mask_is_built_once_for_all_layers_of_a_kind(windows_folder, monkeypatch, dtype):
    built: list[int | None] = []
    seen = FlexLayout._seen

    def noted(layout: FlexLayout, window: int | None) -> Any:
        built.append(window)
        return seen(layout, window)

    monkeypatch.setattr(FlexLayout, "_seen", noted)
    engine = make_engine(windows_folder, param_dtype="bfloat16")
    batch = pack(make_sequences(1))
    with engine._runner.in_float32() if dtype == "float32" else nullcontext():
        # After it: proofs in float32 take the exact calls.
        engine._runner._kernel = "flex"
        log_probs(engine, batch)
    assert len(built) == 2
    assert len(set(built)) == 2


def test_log_probs_do_not_depend_on_the_temperatures_of_others(model_folder):
    """Temperatures of a batch that has several are exact, as is the only one of a batch."""
    engine = make_engine(model_folder, param_dtype="bfloat16")
    sequences = make_sequences(1, gaps=False)

    def at(*temperatures: float) -> torch.Tensor:
        return log_probs(
            engine,
            pack(
                [
                    dataclasses.replace(sequence, temperature=temperatures[i % len(temperatures)])
                    for i, sequence in enumerate(sequences)
                ]
            ),
        )

    first = torch.tensor([i % 2 == 0 for i, s in enumerate(sequences) for _ in s.response_ids])
    assert torch.equal(at(0.7, 1.3), torch.where(first, at(0.7), at(1.3)))
