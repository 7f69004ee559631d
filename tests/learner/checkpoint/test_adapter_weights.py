"""The model of a checkpoint that holds an adapter alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollmesh.learner.checkpoint.adapter_weights import CheckpointAdapter
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.model_files.full_weights import read_full
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import DataError
from rollmesh.testing.contract_state import save
from rollmesh.testing.engine_cases import assert_same, make_sequences, make_spec, train

_LORA = LoraSection(rank=3, alpha=12.0)


@pytest.mark.parametrize("architecture", ["tied", "experts"])
def test_a_checkpoint_and_the_engine_that_wrote_it_give_the_same_model(
    engine_models: dict[str, Path], architecture: str, tmp_path: Path
) -> None:
    model = engine_models[architecture]
    engine = create_engine(make_spec(model, lora=_LORA))
    for seed in range(2):
        train(engine, make_sequences(seed))
    (tmp_path / "checkpoint").mkdir()
    save(engine, tmp_path / "checkpoint")
    engine.export_hf(tmp_path / "exported")
    engine.close()
    with StoredModel(model) as source:
        found = dict(read_full(source, torch.float32, CheckpointAdapter(tmp_path / "checkpoint", _LORA.scale)))
    with StoredModel(tmp_path / "exported") as exported:
        names = exported.describe().keys()
    assert found.keys() == names
    if architecture == "tied":
        assert_same(found, load_file(tmp_path / "exported" / "model.safetensors"), 1e-6)


def test_a_checkpoint_without_an_adapter_is_refused(engine_models: dict[str, Path], tmp_path: Path) -> None:
    engine = create_engine(make_spec(engine_models["tied"]))
    save(engine, tmp_path)
    engine.close()
    with pytest.raises(DataError, match="holds no adapter"):
        CheckpointAdapter(tmp_path, 1.0)
