"""Contract of engines: weights that leave, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollmesh.learner.engines.interface import STATE_NAME, Engine, ExportedTensor, WeightShard
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.errors import DataError
from rollmesh.testing.contract_inference import infer
from rollmesh.testing.engine_cases import (
    assert_same,
    infinite_loss,
    make_batches,
    make_sequences,
    make_spec,
    policy_loss,
    train,
    weights,
)
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.suite import Suite
from rollmesh.testing.worlds import EngineLayout, EngineWorld, Harness

# For what hangs.
_WRITE_S = 240.0
# A warm-up and a decay show whether the schedule is resumed.
_OPTIMIZER = OptimizerSection(lr=1e-2, eps=1e-2, schedule="cosine", warmup_steps=2)
Weights = dict[str, Tensor]


class StateContract(Suite):
    """Weights leave under the names of the model; a checkpoint is a moment of the run, in whatever layout.

    Attributes:
        also_continued_in: layouts, in addition to those in which it is run, that load what these have written.
    """

    also_continued_in: ClassVar[Sequence[EngineLayout]] = ()

    @pytest.mark.parametrize("architecture", ["dense", "tied", "experts"])
    def test_weights_have_the_models_names_once(
        self, world: EngineWorld, engine_models: Mapping[str, Path], architecture: str
    ) -> None:
        folder = engine_models[architecture]
        found, *others = world.run(_exported, folder)
        expected = dict(
            AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, trust_remote_code=False
            ).named_parameters()
        )
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert not any(others)

    @pytest.mark.parametrize("architecture", ["tied", "experts"])
    def test_every_process_may_hold_a_part(
        self, world: EngineWorld, engine_models: Mapping[str, Path], architecture: str
    ) -> None:
        seen = world.run(_exported_in_parts, engine_models[architecture])
        whole = seen[0][0]
        parts = [parts for _, parts, _, _, _ in seen]
        assert sum(len(part) for part in parts) == len(whole)
        assert_same({name: tensor for part in parts for name, tensor in part.items()}, whole, 0.0)
        assert [list(part) for part in parts] == [later for _, _, later, _, _ in seen], "the same in the next version"
        described = seen[0][3]
        assert all(each == described for _, _, _, each, _ in seen)
        assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in described] == [
            (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in whole.items()
        ]
        for process, part in enumerate(parts):
            assert list(part) == [tensor.name for tensor in described if tensor.holder == process]
        filled = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
        for *_, shards in seen:
            for name, place, shard in shards:
                assert filled[name][place].isnan().all(), f"{name} is filled twice"
                filled[name][place] = shard
        assert_same(filled, whole, 0.0)

    @pytest.mark.parametrize("architecture", ["dense", "tied", "experts"])
    def test_an_exported_folder_gives_the_same_log_probs(
        self, world: EngineWorld, engine_models: Mapping[str, Path], architecture: str, tmp_path: Path
    ) -> None:
        for trained, loaded in world.run(_export_and_load, engine_models[architecture], tmp_path / "exported"):
            torch.testing.assert_close(loaded, trained, atol=1e-6, rtol=0)
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=False).config.architectures

    @pytest.mark.parametrize("steps", [0, 1], ids=["before the first step", "after a step"])
    def test_a_run_continues_as_if_nothing_had_happened(
        self, world: EngineWorld, engine_models: Mapping[str, Path], steps: int, tmp_path: Path
    ) -> None:
        for (metrics, expected), (resumed_metrics, found), extra in world.run(
            _resumed, engine_models["tied"], steps, tmp_path
        ):
            assert extra == {"cursor": {"epoch": 3}}
            assert resumed_metrics == metrics
            if expected:
                assert_same(found, expected, 0.0)

    def test_training_goes_on_while_a_checkpoint_is_written(
        self, world: EngineWorld, engine_models: Mapping[str, Path], tmp_path: Path
    ) -> None:
        at_begin, at_end, loaded = world.run(_written_meanwhile, engine_models["tied"], tmp_path)[0]
        assert_same(loaded, at_begin, 0.0)
        assert any(not torch.equal(at_end[name], at_begin[name]) for name in at_begin)

    @pytest.mark.parametrize("case", ["not finite", "given up"])
    def test_gradients_that_no_step_has_used_have_no_part_in_a_checkpoint(
        self, world: EngineWorld, engine_models: Mapping[str, Path], case: str, tmp_path: Path
    ) -> None:
        untouched, saved, resumed = world.run(_unused_gradients, engine_models["tied"], case, tmp_path)[0]
        assert_same(saved, untouched, 0.0)
        assert_same(resumed, untouched, 0.0)

    def test_another_layout_continues(
        self, world: EngineWorld, engine_models: Mapping[str, Path], engine_worlds: GetWorld, tmp_path: Path
    ) -> None:
        expected = world.run(_save_and_train, engine_models["experts"], tmp_path)[0]
        for layout in (*self.layouts, *self.also_continued_in):
            found = engine_worlds(layout).run(_load_and_train, engine_models["experts"], tmp_path)[0]
            assert_same(found, expected, 1e-3)

    def test_a_checkpoint_is_of_a_moment_between_two_steps(
        self, world: EngineWorld, engine_models: Mapping[str, Path], tmp_path: Path
    ) -> None:
        world.run(_save_amid_a_step, engine_models["tied"], tmp_path)

    @pytest.mark.parametrize("found", ["nothing", "another model", "half a file"])
    def test_a_folder_that_is_no_checkpoint_of_the_model_is_refused_and_changes_nothing(
        self, world: EngineWorld, engine_models: Mapping[str, Path], found: str, tmp_path: Path
    ) -> None:
        if found != "nothing":
            world.run(_save_and_train, engine_models["dense" if found == "another model" else "tied"], tmp_path)
        if found == "half a file":
            (tmp_path / STATE_NAME).write_text('{"steps": 1}')
        untouched, refused = world.run(_refused, engine_models["tied"], tmp_path)[0]
        assert_same(refused, untouched, 0.0)


def save(engine: Engine, folder: Path, extra: dict[str, object] | None = None) -> None:
    """A checkpoint, written when this returns."""
    engine.begin_checkpoint(folder, extra or {}).result(_WRITE_S)
    engine.world.barrier()


def _exported(harness: Harness, model: Path) -> Weights:
    engine = harness.make(make_spec(model, model=ModelSection(path=str(model), dtype="bfloat16")))
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


def _exported_in_parts(
    harness: Harness, model: Path
) -> tuple[Weights, Weights, list[str], Sequence[ExportedTensor], list[WeightShard]]:
    engine = harness.make(make_spec(model))
    holders = range(engine.layout.processes)
    described = engine.exported_tensors(torch.float32, holders=holders)
    part = {name: tensor.clone() for name, tensor in engine.export_weights(holders=holders)}
    whole = weights(engine)
    shards = [(name, place, tensor.clone()) for name, place, tensor in engine.exported_shards(torch.float32)]
    train(engine, make_sequences(1))
    return whole, part, [name for name, _ in engine.export_weights(holders=holders)], described, shards


def _export_and_load(harness: Harness, model: Path, folder: Path) -> tuple[Tensor, Tensor]:
    engine = harness.make(make_spec(model))
    train(engine, make_sequences(1))
    engine.export_hf(folder)
    sequences = make_sequences(2)
    return tuple(infer(each, sequences)["log_probs"] for each in (engine, harness.make(make_spec(folder))))  # type: ignore[return-value]


def _resumed(harness: Harness, model: Path, steps: int, folder: Path) -> Any:
    first, second = (harness.make(make_spec(model, optimizer=_OPTIMIZER)) for _ in range(2))
    for seed in range(steps):
        train(first, make_sequences(seed))
    save(first, folder, {"cursor": {"epoch": 3}})
    expected = [train(first, make_sequences(seed)).metrics for seed in (5, 6)]
    extra = second.load_checkpoint(folder)
    found = [train(second, make_sequences(seed)).metrics for seed in (5, 6)]
    return (expected, weights(first)), (found, weights(second)), extra


def _written_meanwhile(harness: Harness, model: Path, folder: Path) -> tuple[Weights, Weights, Weights]:
    engine, loaded = (harness.make(make_spec(model)) for _ in range(2))
    train(engine, make_sequences(1))
    at_begin = weights(engine)
    written = engine.begin_checkpoint(folder, {})
    for seed in (2, 3):
        train(engine, make_sequences(seed))
    written.result(_WRITE_S)
    engine.world.barrier()
    loaded.load_checkpoint(folder)
    return at_begin, weights(engine), weights(loaded)


def _unused_gradients(harness: Harness, model: Path, case: str, folder: Path) -> list[Weights]:
    untouched, saved, resumed = engines = [harness.make(make_spec(model)) for _ in range(3)]
    if case == "not finite":
        assert train(saved, make_sequences(1), infinite_loss).skipped
    else:
        batches = make_batches(saved, make_sequences(1))
        saved.accumulate(batches, policy_loss, saved.global_counts(batches))
        saved.discard()
    save(saved, folder)
    resumed.load_checkpoint(folder)
    for engine in engines:
        train(engine, make_sequences(2))
    del untouched
    return [weights(engine) for engine in engines]


def _save_and_train(harness: Harness, model: Path, folder: Path) -> Weights:
    engine = harness.make(make_spec(model, optimizer=_OPTIMIZER))
    train(engine, make_sequences(1))
    save(engine, folder)
    train(engine, make_sequences(2))
    return weights(engine)


def _load_and_train(harness: Harness, model: Path, folder: Path) -> Weights:
    engine = harness.make(make_spec(model, optimizer=_OPTIMIZER))
    engine.load_checkpoint(folder)
    train(engine, make_sequences(2))
    return weights(engine)


def _save_amid_a_step(harness: Harness, model: Path, folder: Path) -> None:
    engine = harness.make(make_spec(model))
    batches = make_batches(engine, make_sequences(1))
    engine.accumulate(batches, policy_loss, engine.global_counts(batches))
    with pytest.raises(RuntimeError):
        engine.begin_checkpoint(folder, {})
    with pytest.raises(RuntimeError):
        engine.load_checkpoint(folder)


def _refused(harness: Harness, model: Path, folder: Path) -> list[Weights]:
    engines = untouched, refused = [harness.make(make_spec(model)) for _ in range(2)]
    for engine in engines:
        train(engine, make_sequences(1))
    with pytest.raises(DataError):
        refused.load_checkpoint(folder)
    for engine in engines:
        train(engine, make_sequences(2))
    return [weights(untouched), weights(refused)]
