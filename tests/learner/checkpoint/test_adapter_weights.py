"""The model of a checkpoint that holds an adapter alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollmesh.export import latest_checkpoint
from rollmesh.learner.checkpoint.adapter_weights import CheckpointAdapter
from rollmesh.learner.checkpoint.hf_folders import write_adapter_folder
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.model_files.full_weights import read_full
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.trajectory.versions import PolicyVersion
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


@pytest.mark.parametrize("rank_stabilized", [False, True])
def test_peft_loads_the_adapter_of_a_checkpoint(
    engine_models: dict[str, Path], tmp_path: Path, *, rank_stabilized: bool
) -> None:
    from peft import PeftModel

    model, lora = engine_models["tied"], _LORA.model_copy(update={"rank_stabilized": rank_stabilized})
    engine = create_engine(make_spec(model, lora=lora))
    train(engine, make_sequences(0))
    CheckpointStore(tmp_path / "checkpoints").begin({"actor": engine}, PolicyVersion(1, 3), {}).result(240)
    checkpoint = latest_checkpoint(tmp_path)
    merged = {name: tensor.clone() for name, tensor in engine.export_weights(torch.float32)}
    engine.close()
    write_adapter_folder(checkpoint, model, lora, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    assert_same({name: found.state_dict()[name] for name in merged}, merged, 1e-6)
    with pytest.raises(ConfigError, match="is not empty"):
        write_adapter_folder(checkpoint, model, lora, tmp_path / "adapter")

    # A run begins with it, whatever its seed.
    begun = create_engine(make_spec(model, lora=lora.model_copy(update={"start_from": tmp_path / "adapter"}), seed=7))
    assert_same(dict(begun.export_weights(torch.float32)), merged, 1e-6)
    begun.close()
    for wrong in ({"rank": 2}, {"alpha": 1.0}, {"targets": ["q_proj"]}):
        with pytest.raises(DataError):
            changes = {"start_from": tmp_path / "adapter", **wrong}
            create_engine(make_spec(model, lora=lora.model_copy(update=changes)))
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        create_engine(make_spec(model, lora=lora.model_copy(update={"start_from": tmp_path / "adapter"})))


def test_a_checkpoint_without_an_adapter_is_refused(engine_models: dict[str, Path], tmp_path: Path) -> None:
    engine = create_engine(make_spec(engine_models["tied"]))
    save(engine, tmp_path)
    engine.close()
    with pytest.raises(DataError, match="holds no adapter"):
        CheckpointAdapter(tmp_path, 1.0)
