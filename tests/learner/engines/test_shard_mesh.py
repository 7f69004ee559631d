"""Meshes of shards are on the engine's device, whatever else the machine has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from rollmesh.planning.architecture import build_on_meta, read_shape
from rollmesh.planning.block_costs import count_block_costs
from rollmesh.planning.fsdp_memory import FsdpSetup
from rollmesh.planning.role_memory import LogitRoom
from rollmesh.planning.trace import trace_step
from tests.learner.engines.models import make_engine

torch.set_num_threads(1)


@pytest.fixture
def beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 by itself shards over the machine's accelerator."""
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))


@pytest.mark.usefixtures("beside_a_gpu")
def test_an_engine_on_the_cpu_is_sharded_there(model_folder: Path) -> None:
    engine = make_engine(model_folder, param_dtype="bfloat16")
    parameters = list(engine._runner.module.parameters())
    assert parameters
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.device_type == parameter.device.type == "cpu"
    engine.close()


@pytest.mark.usefixtures("beside_a_gpu")
def test_a_planned_step_is_traced_on_the_cpu() -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    shape, costs = read_shape("llama", build_on_meta(config)), count_block_costs(config, torch.bfloat16, 1)
    setup = FsdpSetup(
        name="actor",
        shape=shape,
        costs=costs,
        trained=True,
        ranks=2,
        shards=2,
        sharded=True,
        compute_bytes=2,
        recompute=True,
        offload=False,
        tokens=32,
        micro_batches=1,
        logits=LogitRoom(kept=1 << 20, tile=1 << 10, rows=32),
    )
    assert trace_step(config, setup).micro_batch > setup.parameters
