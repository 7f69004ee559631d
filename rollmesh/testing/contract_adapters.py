"""Contract of engines: low-rank adapters on a model that stays as it was loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from rollmesh.learner.engines.tensors.state import MODEL_KEY
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.testing.contract_inference import infer
from rollmesh.testing.contract_state import Weights, save
from rollmesh.testing.engine_cases import assert_same, make_sequences, make_spec, train, weights
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.suite import Suite
from rollmesh.testing.worlds import EngineWorld, Harness

_LORA = LoraSection(rank=4, alpha=8.0)
_FEW = LoraSection(rank=2, alpha=4.0, targets=["q_proj", "down_proj"], rank_stabilized=True)
# In the second step the first factor has a gradient too.
_STEPS = 2


class AdapterContract(Suite):
    """Adapters train, the base does not; what leaves the engine is their sum."""

    @pytest.mark.parametrize("architecture", ["dense", "tied", "experts"])
    def test_an_adapter_begins_as_the_base_which_never_changes(
        self, world: EngineWorld, engine_models: Mapping[str, Path], architecture: str
    ) -> None:
        for base, begun, without, adapted in world.run(_outputs, engine_models[architecture], _LORA):
            for found in (begun, without):
                torch.testing.assert_close(found, base, atol=0.0, rtol=0.0)
            assert (adapted - base).abs().max() > 1e-3

    @pytest.mark.parametrize("lora", [_LORA, _FEW], ids=["all linear layers", "some"])
    def test_all_layouts_train_the_same_adapter(
        self, world: EngineWorld, engine_models: Mapping[str, Path], engine_worlds: GetWorld, lora: LoraSection
    ) -> None:
        model = engine_models["tied"]
        before, after = world.run(_trained, model, lora)[0]
        _, expected = engine_worlds(self.layouts[0]).run(_trained, model, lora)[0]
        assert_same(after, expected, 1e-5)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {
            name
            for name in before
            if name.endswith("proj.weight") and (lora is _LORA or name.split(".")[-2] in ("q_proj", "down_proj"))
        }
        for name in changed:
            assert torch.linalg.matrix_rank((after[name] - before[name]).double(), rtol=1e-4) <= lora.rank

    def test_an_exported_folder_has_the_adapter_merged(
        self, world: EngineWorld, engine_models: Mapping[str, Path], tmp_path: Path
    ) -> None:
        for adapted, merged in world.run(_export_and_load, engine_models["dense"], tmp_path / "merged"):
            torch.testing.assert_close(merged, adapted, atol=1e-5, rtol=0)

    def test_a_checkpoint_holds_the_adapter_alone_and_another_layout_continues(
        self, world: EngineWorld, engine_models: Mapping[str, Path], engine_worlds: GetWorld, tmp_path: Path
    ) -> None:
        expected = world.run(_save_and_train, engine_models["tied"], tmp_path)[0]
        for layout in self.layouts:
            found = engine_worlds(layout).run(_load_and_train, engine_models["tied"], tmp_path)[0]
            assert_same(found, expected, 1e-5)

    def test_a_checkpoint_of_another_rank_is_refused(
        self, world: EngineWorld, engine_models: Mapping[str, Path], tmp_path: Path
    ) -> None:
        world.run(_save_and_train, engine_models["tied"], tmp_path)
        world.run(_refused, engine_models["tied"], tmp_path)

    def test_layers_that_the_model_lacks_are_refused(
        self, world: EngineWorld, engine_models: Mapping[str, Path]
    ) -> None:
        world.run(_unknown_layer, engine_models["tied"])


def _outputs(harness: Harness, model: Path, lora: LoraSection) -> tuple[Tensor, ...]:
    sequences = make_sequences(7)

    def log_probs(engine: Any, **how: Any) -> Tensor:
        return infer(engine, sequences, **how)["log_probs"]

    engine = harness.make(make_spec(model, lora=lora))
    engine.probe()
    base, begun = log_probs(harness.make(make_spec(model, optimizer=None))), log_probs(engine)
    for seed in range(_STEPS):
        train(engine, make_sequences(seed))
    return base, begun, log_probs(engine, adapter=False), log_probs(engine)


def _trained(harness: Harness, model: Path, lora: LoraSection) -> tuple[Weights, Weights]:
    engine = harness.make(make_spec(model, lora=lora))
    before = weights(engine)
    for seed in range(_STEPS):
        train(engine, make_sequences(seed))
    return before, weights(engine)


def _export_and_load(harness: Harness, model: Path, folder: Path) -> tuple[Tensor, Tensor]:
    engine = harness.make(make_spec(model, lora=_LORA))
    for seed in range(_STEPS):
        train(engine, make_sequences(seed))
    engine.export_hf(folder)
    sequences = make_sequences(8)
    merged = harness.make(make_spec(folder, optimizer=None))
    return infer(engine, sequences)["log_probs"], infer(merged, sequences)["log_probs"]


def _save_and_train(harness: Harness, model: Path, folder: Path) -> Weights:
    engine = harness.make(make_spec(model, lora=_LORA))
    train(engine, make_sequences(1))
    save(engine, folder)
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert all(".lora_" in name for name in stored if name.startswith(f"{MODEL_KEY}."))
    train(engine, make_sequences(2))
    return weights(engine)


def _load_and_train(harness: Harness, model: Path, folder: Path) -> Weights:
    engine = harness.make(make_spec(model, lora=_LORA))
    engine.load_checkpoint(folder)
    train(engine, make_sequences(2))
    return weights(engine)


def _refused(harness: Harness, model: Path, folder: Path) -> None:
    for lora in (None, LoraSection(rank=2)):
        with pytest.raises(DataError):
            harness.make(make_spec(model, lora=lora)).load_checkpoint(folder)


def _unknown_layer(harness: Harness, model: Path) -> None:
    with pytest.raises(ConfigError, match="no linear layer 'qkv'"):
        harness.make(make_spec(model, lora=LoraSection(targets=["qkv"])))
