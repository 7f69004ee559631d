"""Contract of engines: log-probs, values, and how results reach every process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.engines.registry import ModelType
from rollmesh.mesh.config.learner import MemorySection
from rollmesh.mesh.errors import ConfigError
from rollmesh.testing.engine_cases import (
    critic_loss,
    divide,
    export_critic,
    make_batches,
    make_sequences,
    make_spec,
    policy_loss,
    train,
    truth,
)
from rollmesh.testing.suite import Suite
from rollmesh.testing.worlds import EngineWorld, Harness


class InferenceContract(Suite):
    """Outputs are those of plain forward passes, and every process gets them."""

    @pytest.mark.parametrize("architecture", ["dense", "tied", "experts"])
    def test_log_probs_are_those_of_plain_forward_passes(
        self, world: EngineWorld, engine_models: Mapping[str, Path], architecture: str
    ) -> None:
        model, sequences = engine_models[architecture], make_sequences(1)
        expected = truth(model, sequences).outputs
        for found in world.run(_infer, model, sequences):
            assert found.keys() == {"log_probs", "entropy", "sum_pi_squared"}
            for name, values in found.items():
                torch.testing.assert_close(values, getattr(expected, name), atol=1e-5, rtol=1e-5)

    def test_values_are_those_of_plain_forward_passes(
        self, world: EngineWorld, engine_models: Mapping[str, Path], tmp_path: Path
    ) -> None:
        sequences = make_sequences(1)
        world.run(export_critic, engine_models["tied"], tmp_path / "critic")
        expected = truth(tmp_path / "critic", sequences, critic_loss, values=True).outputs.values
        for found in world.run(_infer, tmp_path / "critic", sequences, "value_model"):
            torch.testing.assert_close(found["values"], expected, atol=1e-5, rtol=1e-5)

    def test_a_new_value_model_begins_at_zero(self, world: EngineWorld, engine_models: Mapping[str, Path]) -> None:
        for found in world.run(_infer, engine_models["dense"], make_sequences(1), "value_model"):
            assert not found["values"].any()

    def test_nothing_to_infer_is_no_failure(self, world: EngineWorld, engine_models: Mapping[str, Path]) -> None:
        for found in world.run(_infer_nothing, engine_models["tied"]):
            assert found == [0, 0]

    def test_ranks_bring_their_values_to_every_process_in_order(
        self, world: EngineWorld, engine_models: Mapping[str, Path]
    ) -> None:
        for size, uneven, flags in world.run(_gather, engine_models["tied"]):
            assert uneven == [[float(rank)] * rank for rank in range(size)]
            assert flags == [[rank % 2 == 0, True] for rank in range(size)]

    def test_counts_are_those_of_all_ranks(self, world: EngineWorld, engine_models: Mapping[str, Path]) -> None:
        sequences = make_sequences(1)
        tokens = sum(int(sequence.response_mask.sum()) for sequence in sequences)
        assert set(world.run(_counts, engine_models["tied"], sequences)) == {(tokens, len(sequences))}

    def test_layouts_fit_together(self, world: EngineWorld, engine_models: Mapping[str, Path]) -> None:
        layouts = world.run(_layout, engine_models["tied"])
        assert [layout.process for layout in layouts] == list(range(world.layout.processes))
        assert [layout.leads for layout in layouts].count(True) == 1
        assert len({(layout.sources, layout.processes) for layout in layouts}) == 1
        for rank in range(layouts[0].dp_size):
            assert [layout.has_results for layout in layouts if layout.dp_rank == rank].count(True) == 1

    def test_a_base_that_does_not_exist_is_refused(self, world: EngineWorld, engine_models: Mapping[str, Path]) -> None:
        world.run(_without_adapter, engine_models["tied"])

    @pytest.mark.parametrize("rests", [False, True], ids=["on its device", "on the host"])
    def test_a_frozen_model_stays_as_it_was(
        self, world: EngineWorld, engine_models: Mapping[str, Path], rests: bool
    ) -> None:
        for first, after, again in world.run(_frozen, engine_models["tied"], rests):
            assert torch.equal(first, again)
            assert not torch.equal(first, after)

    @pytest.mark.parametrize("reshard", [True, False], ids=["gathered again", "stays gathered"])
    def test_outputs_follow_steps_amid_which_there_were_others(
        self, world: EngineWorld, engine_models: Mapping[str, Path], reshard: bool
    ) -> None:
        """In half precision, in which engines make copies of their weights; these are of before the step."""
        (*before, expected, found), *_ = world.run(_amid_steps, engine_models["tied"], reshard)
        assert torch.equal(found, expected)
        assert not any(torch.equal(found, each) for each in before)


def infer(engine: Engine, sequences: Sequence[TrainSequence], budget: int = 24, **how: Any) -> dict[str, Tensor]:
    """Outputs for the trained tokens by field, sequence after sequence, in every process; collective."""
    parts = engine.infer(make_batches(engine, sequences, budget), **how)
    if not engine.layout.has_results:
        assert parts == []
    kind = ("log_probs", "entropy", "sum_pi_squared", "values")
    fields = [name for name in kind if _any_rank_has(engine, parts, name)]
    lengths = [int(sequence.response_mask.sum()) for sequence in sequences]
    places = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    division = divide(engine, sequences, budget)
    order = np.concatenate([places[index] for rank in division for micro in rank for index in micro])
    found = {}
    for name in fields:
        own = torch.cat([getattr(part, name) for part in parts]) if parts else torch.zeros(0, device=engine.device)
        gathered = torch.cat(engine.gather(own)).cpu()
        found[name] = torch.empty_like(gathered)
        found[name][torch.from_numpy(order)] = gathered
    return found


def _any_rank_has(engine: Engine, parts: Sequence[Any], name: str) -> bool:
    own = any(getattr(part, name) is not None for part in parts)
    return bool(engine.world.max_int(int(own)))


def _infer(
    harness: Harness, model: Path, sequences: Sequence[TrainSequence], model_type: ModelType = "language_model"
) -> dict[str, Tensor]:
    return infer(harness.make(make_spec(model), model_type), sequences, sum_pi_squared=True)


def _infer_nothing(harness: Harness, model: Path) -> list[int]:
    engine = harness.make(make_spec(model))
    (sequence,) = make_sequences(1, 1)[:1]
    silent = pack([replace(sequence, response_mask=np.zeros_like(sequence.response_mask))], device=engine.device)
    nothing = sum(len(output.policy()[0]) for output in engine.infer([silent]))
    return [nothing, len(engine.infer([]))]


def _gather(harness: Harness, model: Path) -> tuple[int, list[list[float]], list[list[bool]]]:
    engine = harness.make(make_spec(model))
    rank = engine.layout.dp_rank
    uneven = engine.gather(torch.full((rank,), float(rank)))
    flags = engine.gather(torch.tensor([rank % 2 == 0, True]))
    return engine.layout.dp_size, [part.tolist() for part in uneven], [part.tolist() for part in flags]


def _counts(harness: Harness, model: Path, sequences: Sequence[TrainSequence]) -> tuple[int, int]:
    engine = harness.make(make_spec(model))
    counts = engine.global_counts(make_batches(engine, sequences))
    return counts.tokens, counts.sequences


def _layout(harness: Harness, model: Path) -> Any:
    return harness.make(make_spec(model)).layout


def _without_adapter(harness: Harness, model: Path) -> None:
    engine = harness.make(make_spec(model))
    with pytest.raises(ConfigError):
        engine.infer([], adapter=False)


def _frozen(harness: Harness, model: Path, rests: bool) -> tuple[Tensor, Tensor, Tensor]:
    sequences = make_sequences(1)
    actor = harness.make(make_spec(model))
    frozen = harness.make(make_spec(model, optimizer=None, offload=rests))
    assert actor.trained
    assert not frozen.trained
    first = infer(frozen, sequences)["log_probs"]
    train(actor, sequences)
    with pytest.raises(ConfigError):
        train(frozen, sequences)
    return first, infer(actor, sequences)["log_probs"], infer(frozen, sequences)["log_probs"]


def _amid_steps(harness: Harness, model: Path, reshard: bool) -> list[Tensor]:
    """Log-probs amid a step and amid one without micro-batches, then after both, without them and with them."""
    sequences = make_sequences(4)
    memory = MemorySection(reshard_after_forward=reshard)
    untouched, engine = (harness.make(make_spec(model, param_dtype="bfloat16", memory=memory)) for _ in range(2))
    found: list[Tensor] = []
    for each in (untouched, engine):
        batches = make_batches(each, make_sequences(2))
        counts = each.global_counts(batches)
        each.accumulate(batches, policy_loss, counts)
        if each is engine:
            found.append(infer(each, sequences)["log_probs"])
        each.apply()
        if each is engine:
            found.append(infer(each, sequences)["log_probs"])
        each.accumulate([], policy_loss, counts)
        each.apply()
    return found + [infer(each, sequences)["log_probs"] for each in (untouched, engine)]
