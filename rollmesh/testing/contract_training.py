"""Contract of engines: gradients and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.types import LossOutput
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.engines.interface import Engine, StepResult
from rollmesh.learner.engines.registry import ModelType
from rollmesh.mesh.config.learner import MemorySection, OptimizerSection
from rollmesh.testing.engine_cases import (
    Truth,
    assert_same,
    critic_loss,
    entropy_loss,
    export_critic,
    gradient_of_step,
    infinite_loss,
    make_batches,
    make_sequences,
    make_spec,
    plain_step_spec,
    policy_loss,
    train,
    truth,
    weights,
)
from rollmesh.testing.suite import Suite
from rollmesh.testing.worlds import EngineWorld, Harness

Step = tuple[StepResult, dict[str, Tensor]]
_FEW = 3
_MANY = "many micro-batches"
BATCHES: dict[str, tuple[int, int]] = {
    "one micro-batch": (6, 1 << 20),
    _MANY: (6, 24),
    "ranks with different numbers": (3, 24),
    "ranks without any": (1, 1 << 20),
}
"""Groups of a batch, and tokens of a micro-batch."""
VARIANTS: dict[str, dict[str, Any]] = {
    "activations are computed again": {"activation_checkpointing": True},
    "gradients travel once": {"sync_once": True},
    "both": {"activation_checkpointing": True, "sync_once": True},
    "everything rests between calls": {
        "memory": MemorySection(offload_params=True, offload_gradients=True, offload_optimizer=True)
    },
    "logits are whole": {"memory": MemorySection(logits_mib=0)},
}
"""Fields of `EngineSpec` that change no result."""


class TrainingContract(Suite):
    """Gradients are those of plain forward passes, and a step changes all or nothing."""

    @pytest.mark.parametrize(
        ("architecture", "batch"),
        [*(("tied", batch) for batch in BATCHES), ("dense", _MANY), ("experts", _MANY)],
    )
    def test_a_gradient_is_that_of_plain_forward_passes(
        self, world: EngineWorld, engine_models: Mapping[str, Path], architecture: str, batch: str
    ) -> None:
        groups, budget = BATCHES[batch]
        model = engine_models[architecture]
        found = world.run(_step, model, make_sequences(1, groups), policy_loss, budget, {})
        _check(found, model, groups, policy_loss)

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_ways_to_compute_a_gradient_do_not_change_it(
        self, world: EngineWorld, engine_models: Mapping[str, Path], variant: str
    ) -> None:
        model = engine_models["tied"]
        found = world.run(_step, model, make_sequences(1, _FEW), policy_loss, 24, VARIANTS[variant])
        _check(found, model, _FEW, policy_loss)

    def test_the_entropy_is_differentiated_where_it_is_asked_for(
        self, world: EngineWorld, engine_models: Mapping[str, Path]
    ) -> None:
        model = engine_models["dense"]
        found = world.run(_step, model, make_sequences(1, _FEW), entropy_loss, 24, {"entropy_gradient": True})
        _check(found, model, _FEW, entropy_loss)

    def test_half_precision_keeps_float32_masters(self, world: EngineWorld, engine_models: Mapping[str, Path]) -> None:
        model = engine_models["tied"]
        changes = {"param_dtype": "bfloat16"}
        (result, gradient), *_ = world.run(_step, model, make_sequences(1, _FEW), policy_loss, 24, changes)
        expected = _truth(model, _FEW, policy_loss)
        assert result.metrics["loss"] == pytest.approx(expected.loss, abs=0.02)
        assert_same(gradient, expected.gradient, 0.2)

    def test_a_value_models_gradient_is_that_of_plain_forward_passes(
        self, world: EngineWorld, engine_models: Mapping[str, Path], tmp_path: Path
    ) -> None:
        sequences = make_sequences(1)
        world.run(export_critic, engine_models["tied"], tmp_path / "critic")
        found = world.run(_step, tmp_path / "critic", sequences, critic_loss, 24, {}, "value_model")
        expected = truth(tmp_path / "critic", sequences, critic_loss, values=True)
        assert_same(found[0][1], expected.gradient, 1e-4)
        assert found[0][0].metrics["loss"] == pytest.approx(expected.loss, rel=1e-4)

    def test_a_gradient_may_be_accumulated_in_parts(
        self, world: EngineWorld, engine_models: Mapping[str, Path]
    ) -> None:
        (whole, parts), *_ = world.run(_whole_and_in_parts, engine_models["tied"])
        assert_same(parts, whole)

    @pytest.mark.parametrize(
        "variant",
        # In half precision whole gradients are added up in float32, elsewhere.
        [{}, {"sync_once": True}, {"sync_once": True, "param_dtype": "bfloat16"}],
        ids=["each", "once", "half precision"],
    )
    def test_a_step_that_is_given_up_leaves_nothing(
        self, world: EngineWorld, engine_models: Mapping[str, Path], variant: dict[str, Any]
    ) -> None:
        (before, after, expected, found), *_ = world.run(_given_up, engine_models["tied"], variant)
        assert_same(after, before, 0.0)
        assert_same(found, expected, 0.0)

    def test_a_gradient_that_is_not_finite_changes_nothing(
        self, world: EngineWorld, engine_models: Mapping[str, Path]
    ) -> None:
        for skipped, (before, after, expected, found) in world.run(_not_finite, engine_models["tied"]):
            assert skipped
            if before:
                assert_same(after, before, 0.0)
                assert_same(found, expected, 0.0)

    def test_a_step_without_tokens_changes_nothing_and_is_no_failure(
        self, world: EngineWorld, engine_models: Mapping[str, Path]
    ) -> None:
        for result, before, after in world.run(_without_tokens, engine_models["tied"]):
            assert result == StepResult({}, skipped=False)
            if before:
                assert_same(after, before, 0.0)

    def test_a_step_without_micro_batches_follows_a_gradient_of_zero(
        self, world: EngineWorld, engine_models: Mapping[str, Path]
    ) -> None:
        for result, computed, left_out in world.run(_silent, engine_models["tied"]):
            assert not result.skipped
            assert result.metrics["grad_norm"] == 0.0
            if computed:
                assert_same(left_out, computed)

    def test_the_rate_follows_its_schedule(self, world: EngineWorld, engine_models: Mapping[str, Path]) -> None:
        for rates in world.run(_rates, engine_models["tied"]):
            assert rates == pytest.approx([5e-3, 1e-2, 1e-2, 1e-2 * 7 / 8])

    def test_there_is_no_step_without_a_gradient(self, world: EngineWorld, engine_models: Mapping[str, Path]) -> None:
        world.run(_apply_nothing, engine_models["tied"])


@cache
def _truth(model: Path, groups: int, loss: Loss) -> Truth:
    """The truth about a batch, once for all layouts and variants."""
    return truth(model, make_sequences(1, groups), loss)


def _check(found: Sequence[Step], model: Path, groups: int, loss: Loss) -> None:
    expected, sequences = _truth(model, groups, loss), make_sequences(1, groups)
    result, gradient = found[0]
    assert_same(gradient, expected.gradient)
    assert result.metrics["loss"] == pytest.approx(expected.loss, rel=1e-4, abs=1e-5)
    assert result.metrics["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-4)
    log_probs, entropy = expected.outputs.policy()
    assert result.metrics["entropy"] == pytest.approx(float(entropy.mean()), rel=1e-4)
    behaviour = np.concatenate([s.behaviour_log_probs[s.response_mask == 1] for s in sequences])
    ratios = (log_probs.numpy() - behaviour).astype(np.float64)
    assert result.metrics["largest_ratio"] == pytest.approx(ratios.max(), rel=1e-4)
    assert result.metrics["ratio/mean"] == pytest.approx(np.exp(ratios).mean(), rel=1e-4)
    assert all(other == result for other, _ in found), "the result is the same in every process"


def _step(
    harness: Harness,
    model: Path,
    sequences: Sequence[TrainSequence],
    loss: Loss,
    token_budget: int,
    changes: dict[str, Any],
    model_type: ModelType = "language_model",
) -> Step:
    engine = harness.make(plain_step_spec(model, **changes), model_type)
    before = weights(engine)
    result = train(engine, sequences, loss, token_budget)
    return result, gradient_of_step(before, weights(engine))


def _whole_and_in_parts(harness: Harness, model: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    sequences = make_sequences(1)
    whole, parts = (harness.make(make_spec(model)) for _ in range(2))
    train(whole, sequences)
    batches = make_batches(parts, sequences)
    counts = parts.global_counts(batches)
    # As many calls everywhere: each takes a part of what this rank has, or nothing.
    for first in range(3):
        parts.accumulate(batches[first::3], policy_loss, counts)
    parts.apply()
    return weights(whole), weights(parts)


def _given_up(harness: Harness, model: Path, changes: dict[str, Any]) -> list[dict[str, Tensor]]:
    untouched, engine = (harness.make(make_spec(model, **changes)) for _ in range(2))
    for each in (untouched, engine):
        train(each, make_sequences(1))
    before = weights(engine)
    # At least two micro-batches for each of four ranks.
    batches = make_batches(engine, make_sequences(2, 8), 24)
    counts = engine.global_counts(batches)
    engine.accumulate(batches, policy_loss, counts)
    engine.discard()
    engine.discard()
    engine.accumulate(batches, policy_loss, counts)
    if engine.layout.dp_size == engine.layout.processes:
        # Else processes that call no loss would wait for the one with the failed loss.
        with pytest.raises(ValueError, match="of the user"):
            engine.accumulate(batches, _FailsLater(), counts)
    engine.discard()
    after = weights(engine)
    for each in (untouched, engine):
        train(each, make_sequences(3))
    return [before, after, weights(untouched), weights(engine)]


class _FailsLater:
    """A loss that fails in its second micro-batch."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, *arguments: Any) -> LossOutput:
        self._calls += 1
        if self._calls > 1:
            raise ValueError("a mistake of the user's")
        return policy_loss(*arguments)


def _not_finite(harness: Harness, model: Path) -> tuple[bool, list[dict[str, Tensor]]]:
    untouched, engine = (harness.make(make_spec(model)) for _ in range(2))
    for each in (untouched, engine):
        train(each, make_sequences(1))
    before = weights(engine)
    result = train(engine, make_sequences(2), infinite_loss)
    after = weights(engine)
    for each in (untouched, engine):
        train(each, make_sequences(3))
    return result.skipped, [before, after, weights(untouched), weights(engine)]


def _without_tokens(harness: Harness, model: Path) -> tuple[StepResult, dict[str, Tensor], dict[str, Tensor]]:
    engine = harness.make(make_spec(model))
    train(engine, make_sequences(1))
    before = weights(engine)
    return train(engine, []), before, weights(engine)


def _silent(harness: Harness, model: Path) -> tuple[StepResult, dict[str, Tensor], dict[str, Tensor]]:
    stepped: list[dict[str, Tensor]] = []
    for left_out in (False, True):
        engine = harness.make(make_spec(model))
        train(engine, make_sequences(1))
        batches = make_batches(engine, make_sequences(2))
        counts = engine.global_counts(batches)
        for batch in batches:
            batch.tokens.advantages.zero_()
        engine.accumulate([] if left_out else batches, policy_loss, counts)
        result = engine.apply()
        stepped.append(weights(engine))
    return result, stepped[0], stepped[1]


def _rates(harness: Harness, model: Path) -> list[float]:
    optimizer = OptimizerSection(lr=1e-2, schedule="linear", warmup_steps=2)
    engine = harness.make(make_spec(model, optimizer=optimizer))
    return [train(engine, make_sequences(seed, 2)).metrics["lr"] for seed in range(4)]


def _apply_nothing(harness: Harness, model: Path) -> None:
    engine: Engine = harness.make(make_spec(model))
    with pytest.raises(RuntimeError):
        engine.apply()
    train(engine, make_sequences(1))
    with pytest.raises(RuntimeError):
        engine.apply()
