"""The formulas, compared with torch's memory tracker and with the memory of real training steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rollmesh.mesh.config.lora import LoraSection
from rollmesh.planning.architecture import build_on_meta, read_shape
from rollmesh.planning.block_costs import count_block_costs
from rollmesh.planning.fsdp_memory import FsdpSetup
from rollmesh.planning.role_memory import LogitRoom
from rollmesh.planning.trace import trace_step
from tests.repository import REPOSITORY

# With these the output layer needs most in some cases, and a block in others.
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
}
EXPERTS = {"moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4}
LORA = LoraSection()
LOGITS = LogitRoom(kept=1 << 30, tile=1 << 21, rows=1024)


@pytest.mark.parametrize(
    ("kind", "settings", "how"),
    [
        pytest.param(
            "qwen3",
            {"tie_word_embeddings": True},
            {"shards": 1, "sharded": False, "compute_bytes": 4},
            marks=pytest.mark.exhaustive,
        ),
        (
            "llama",
            {"tie_word_embeddings": False},
            {"shards": 64, "recompute": False, "tokens": 2048, "micro_batches": 1},
        ),
        ("qwen3_moe", EXPERTS, {"shards": 8, "sp": 4, "recompute": "selective", "tokens": 2048}),
        ("qwen3", {"tie_word_embeddings": True}, {"shards": 8, "tokens": 2048, "lora": LORA}),
        pytest.param(
            "qwen3",
            {"tie_word_embeddings": True},
            {"shards": 8, "recompute": False, "tokens": 2048},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "llama",
            {"tie_word_embeddings": False},
            {"shards": 64, "tokens": 2048, "micro_batches": 1},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "llama",
            {"tie_word_embeddings": False, "vocab_size": 16384, "num_hidden_layers": 3},
            {"shards": 1, "recompute": False, "tokens": 4096, "lora": LORA},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_the_formulas_are_the_trackers_numbers(kind: str, settings: dict[str, Any], how: dict[str, Any]) -> None:
    config = AutoConfig.for_model(kind, **SIZES | settings)
    values = {"sharded": True, "compute_bytes": 2, "recompute": True, "tokens": 1024, "micro_batches": 2} | how
    dtype = torch.float32 if values["compute_bytes"] == 4 else torch.bfloat16
    lora = values.pop("lora", None)
    shape = read_shape(kind, build_on_meta(config, lora))
    costs = count_block_costs(config, dtype, values.get("sp", 1), lora)
    setup = FsdpSetup(
        name="actor",
        shape=shape,
        costs=costs,
        trained=True,
        offload=False,
        logits=LOGITS,
        ranks=values["shards"],
        **values,
    )

    compared = list(trace_step(config, setup, lora).compared(setup.phases()))

    assert [name for name, *_ in compared] == ["inference", "micro-batch", "optimizer"]
    for name, traced, planned in compared:
        assert planned == pytest.approx(traced, rel=0.05), name


@pytest.mark.slow
@pytest.mark.exhaustive
def test_real_steps_take_what_was_planned(tmp_path: Path) -> None:
    """Two gloo ranks; see the script for what is counted. Torch's tracker counts the same, without the processes."""
    from benchmarks.learner.planned_memory import MALLOC

    out = tmp_path / "measured.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.learner.planned_memory", "--small", "--json", str(out)],
        cwd=REPOSITORY,
        env={**os.environ, **MALLOC, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        check=True,
    )

    for cell in json.loads(out.read_text())["cells"]:
        for measured in cell["measured_bytes"]:
            assert cell["planned_bytes"] == pytest.approx(measured, rel=0.1), cell
