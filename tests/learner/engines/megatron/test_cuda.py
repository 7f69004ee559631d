"""The Megatron engine on a CUDA device, with Transformer Engine: the contract of engines, FSDP2's results, overlaps.

The truth of the contract is transformers' eager code on a CPU, and so is FSDP2's engine in float32 here. A process has
Megatron-Core either for the CPU or for CUDA: where other tests have imported it for the CPU these are skipped.
"""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from benchmarks.learner.tiny_models import ARCHITECTURES
from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.engines.interface import Engine
from rollmesh.mesh.config.parallel import MegatronSection, RouterSection
from rollmesh.testing.contract_inference import InferenceContract, infer
from rollmesh.testing.contract_memory import MemoryContract
from rollmesh.testing.contract_state import StateContract
from rollmesh.testing.contract_training import TrainingContract
from rollmesh.testing.engine_cases import (
    critic_loss,
    make_sequences,
    make_spec,
    policy_loss,
    save_random,
    train,
    weights,
)
from rollmesh.testing.worlds import EngineLayout, Harness

CUDA = {"device": "cuda"}
ON_CUDA = EngineLayout("cuda", 1, "megatron", CUDA)
FSDP2_ON_CUDA = EngineLayout("fsdp2_cuda", 1, "fsdp2", CUDA)
REFERENCE = EngineLayout("fsdp2")
HALF = {"param_dtype": "bfloat16"}
# A model of each family; two have experts.
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
STEPS = 3
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"),
    pytest.mark.usefixtures("for_cuda"),
]


@pytest.fixture
def for_cuda() -> None:
    if "rollmesh.learner.engines.megatron.local.cpu" in sys.modules:
        pytest.skip("this process has imported Megatron-Core for the CPU")


class TestInference(InferenceContract):
    """Outputs in float32."""

    layouts = (ON_CUDA,)


class TestTraining(TrainingContract):
    """Gradients and steps in float32."""

    layouts = (ON_CUDA,)


class TestState(StateContract):
    """Exports, checkpoints."""

    layouts = (ON_CUDA,)
    also_continued_in = (FSDP2_ON_CUDA, REFERENCE)


class TestMemory(MemoryContract):
    """Memory at rest on the host, which is pinned."""

    layouts = (ON_CUDA,)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["language_model", "value_model"])
def test_bfloat16_trains_as_fsdp2_does(tmp_path: Path, family: str, kind: Any) -> None:
    """Three steps. Experts are all visited, so that near ties choose no others."""
    model = _model(tmp_path / "model", family)
    exact, there, here = (
        _trained(layout, model, kind, **changes)
        for layout, changes in ((REFERENCE, {}), (FSDP2_ON_CUDA, HALF), (ON_CUDA, HALF))
    )
    # As far from float32 as the other engine is, or nearly so.
    for name, (truth, other, found) in {name: (exact[name], there[name], here[name]) for name in exact}.items():
        allowed = 2.0 * _distance(other, truth) + 5e-3
        assert _distance(found, truth) < allowed, f"{name}: {_distance(found, truth)}, at most {allowed}"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_accepts_every_family(tmp_path: Path, family: str) -> None:
    model = _model(tmp_path / "model", family)
    for dtype, bound in (("bfloat16", 0.1), ("float32", 1e-4)):
        harness = Harness(ON_CUDA)
        evidence = harness.make(make_spec(model, param_dtype=dtype)).probe()
        harness.close()
        assert evidence.truth.larger() < bound, dtype
        assert evidence.leak < bound, dtype


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_overlaps_and_recomputation_change_nothing(tmp_path: Path, family: str) -> None:
    model = _model(tmp_path / "model", family)
    plain = _trained(ON_CUDA, model, "language_model", smooth_loss, **HALF)
    overlap = MegatronSection(overlap_grad_reduce=True, overlap_param_gather=True)
    variants = ({"megatron": overlap}, {"activation_checkpointing": True}, {"activation_checkpointing": "selective"})
    for changes in variants:
        found = _trained(ON_CUDA, model, "language_model", smooth_loss, **HALF, **changes)
        for name, expected in plain.items():
            assert _distance(found[name], expected) < 5e-3, f"{name} with {changes}"


def smooth_loss(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
    """Without the clips of the surrogate, at which a rounding decides whether a token counts."""
    return LossOutput(-(output.policy()[0] * tokens.advantages).sum() / counts.tokens, Metrics())


def test_losses_of_routers_are_measured(tmp_path: Path) -> None:
    harness = Harness(ON_CUDA)
    losses = RouterSection(load_balance_coeff=0.01, z_loss_coeff=0.01)
    engine = harness.make(make_spec(_model(tmp_path / "model", "qwen3_moe"), router=losses, **HALF))
    metrics = train(engine, make_sequences(1)).metrics
    harness.close()
    assert metrics["load_balance_loss"] == pytest.approx(1.0, abs=0.1), "every expert is visited"
    assert metrics["router_z_loss"] > 0


def test_a_step_waits_for_the_device_as_often_for_many_micro_batches(tmp_path: Path) -> None:
    harness = Harness(ON_CUDA)
    engine = harness.make(make_spec(_model(tmp_path / "model", "qwen3"), **HALF))
    for groups in (6, 2):
        train(engine, make_sequences(1, groups), token_budget=24)
    few, many = (_waits_of_a_step(engine, groups) for groups in (2, 6))
    harness.close()
    assert 0 < few == many <= 5


def _waits_of_a_step(engine: Engine, groups: int) -> int:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train(engine, make_sequences(1, groups), token_budget=24)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in seen)


def _model(folder: Path, family: str) -> Path:
    settings = ARCHITECTURES[family].settings
    every = {
        name: settings.get(count)
        for name, count in (("num_experts_per_tok", "num_experts"), ("num_experts_per_tok", "num_local_experts"))
        if settings.get(count)
    }
    return save_random(AutoConfig.for_model(family, **(settings | every)), folder)


def _trained(
    layout: EngineLayout, model: Path, kind: Any, loss: Loss | None = None, **changes: Any
) -> dict[str, torch.Tensor]:
    """Losses, norms, outputs and weights of some steps."""
    harness = Harness(layout)
    engine = harness.make(make_spec(model, **changes), kind)
    loss = loss or (policy_loss if kind == "language_model" else critic_loss)
    try:
        results = [train(engine, make_sequences(seed), loss) for seed in range(STEPS)]
        outputs = infer(engine, make_sequences(STEPS))
        found = weights(engine)
    finally:
        harness.close()
    metrics = {name: torch.tensor([each.metrics[name] for each in results]) for name in ("loss", "grad_norm")}
    everything = torch.cat([tensor.float().cpu().flatten() for _, tensor in sorted(found.items())])
    return metrics | outputs | {"weights": everything}


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-6))
