"""A checkpoint becomes a Hugging Face folder without an engine, and the folder is what the engine would write."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollmesh import export
from rollmesh.export import export_checkpoint, latest_checkpoint
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.engines.fsdp2 import engine as fsdp2
from rollmesh.learner.model_files import folder_writer
from rollmesh.mesh.config import Config
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.testing.engine_cases import make_sequences, train
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout, Harness
from tests.learner.engines.models import make_engine, make_model, make_spec
from tests.learner.engines.training import train_step, weights


@pytest.fixture(autouse=True)
def _without_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models have none, which a run's must."""
    monkeypatch.setattr(export, "resolve_model", lambda model: model)


def config_of(folder: Path, dtype: str = "bfloat16", engine: str = "fsdp2") -> Any:
    given = {
        "model": {"path": str(folder), "dtype": dtype},
        "data": {"train": "rows.parquet"},
        "learner": {"engine": engine},
        "algorithm": "grpo",
    }
    return Config.model_validate(given)


@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("llama", marks=pytest.mark.exhaustive), "qwen3_moe"])
def test_a_checkpoint_becomes_the_folder_that_the_engine_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    folder = make_model(tmp_path / "model", architecture)
    engine = make_engine(folder, model=ModelSection(path=str(folder), dtype="bfloat16"))
    train_step(engine, seed=1)
    CheckpointStore(tmp_path / "checkpoints").begin({"actor": engine}, PolicyVersion(1, 3), {}).result(240)
    engine.export_hf(tmp_path / "written")
    expected = {name: tensor.bfloat16() for name, tensor in weights(engine).items()}
    engine.close()

    monkeypatch.setattr(fsdp2.Fsdp2Engine, "__init__", None)
    export_checkpoint(config_of(folder), latest_checkpoint(tmp_path), tmp_path / "out")
    for path in (tmp_path / "written").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def train_and_save(harness: Harness, folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """A step, a checkpoint, and the folder that the engine itself writes; gives the weights, in the leading process."""
    engine = harness.make(make_spec(folder, model=ModelSection(path=str(folder), dtype="bfloat16")))
    train(engine, make_sequences(1))
    CheckpointStore(out / "checkpoints").begin({"actor": engine}, PolicyVersion(1, 3), {}).result(240)
    engine.export_hf(out / "written")
    return {name: tensor.bfloat16() for name, tensor in weights(engine).items()}


@pytest.mark.parametrize(
    ("architecture", "parallel"),
    [
        ("qwen3", {"tp": 2}),
        ("llama", {"tp": 2}),
        ("qwen3_moe", {"tp": 2}),
        # Two stages have the tied weight. Experts are seen above.
        ("qwen3", {"pp": 2}),
        *(pytest.param(name, {"pp": 2}, marks=pytest.mark.exhaustive) for name in ("llama", "qwen3_moe")),
    ],
)
def test_a_checkpoint_that_megatron_has_divided_becomes_the_same_folder(
    tmp_path: Path, engine_worlds: GetWorld, architecture: str, parallel: dict[str, int]
) -> None:
    folder = make_model(tmp_path / "model", architecture)
    layout = EngineLayout("divided", 2, "megatron", {"parallel": ParallelSection(**parallel)})
    expected, _ = engine_worlds(layout).run(train_and_save, folder, tmp_path)

    export_checkpoint(config_of(folder, engine="megatron"), latest_checkpoint(tmp_path), tmp_path / "out")
    for path in (tmp_path / "written").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a model and a checkpoint of it."""
    folder = tmp_path_factory.mktemp("run")
    engine = make_engine(make_model(folder / "model", "llama"))
    CheckpointStore(folder / "checkpoints").begin({"actor": engine}, PolicyVersion(1, 3), {}).result(240)
    return folder


def test_half_a_model_is_removed_where_a_link_leads_to(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        monkeypatch.context() as patched,
        pytest.raises(DataError, match=r"No space left on device \(free space there"),
    ):
        patched.setattr(folder_writer, "_write_rest", full)
        export_checkpoint(config_of(run / "model"), latest_checkpoint(run), tmp_path / "out")
    assert not list(tmp_path.glob("real/*"))
    export_checkpoint(config_of(run / "model"), latest_checkpoint(run), tmp_path / "out")
    assert (tmp_path / "real" / "config.json").is_file()


def test_checkpoints_of_another_engine_are_not_read(tmp_path: Path) -> None:
    config = config_of(tmp_path, engine="mine")
    with pytest.raises(
        ConfigError, match=r"only checkpoints of fsdp2 and megatron are read .* learner\.engine is mine"
    ):
        export_checkpoint(config, tmp_path, tmp_path / "out")


def test_what_cannot_be_exported_is_named(run: Path, tmp_path: Path) -> None:
    checkpoint, model = latest_checkpoint(run), config_of(run / "model")
    with pytest.raises(DataError, match="is not a checkpoint"):
        export_checkpoint(model, run, tmp_path / "out")
    with pytest.raises(ConfigError, match="is not empty"):
        export_checkpoint(model, checkpoint, run)
    with pytest.raises(ConfigError, match=r"config\.json is a file"):
        export_checkpoint(model, checkpoint, run / "model" / "config.json")
    with pytest.raises(ConfigError, match="cannot be a folder: File name too long"):
        export_checkpoint(model, checkpoint, tmp_path / ("x" * 300))
    with pytest.raises(DataError, match=r"cannot write .*: Not a directory \(choose a folder that you can write\)"):
        export_checkpoint(model, checkpoint, run / "model" / "config.json" / "below")
    other = make_model(tmp_path / "gpt2", "gpt2")
    with pytest.raises(DataError, match=r"holds no transformer\.wte\.weight"):
        export_checkpoint(config_of(other), checkpoint, tmp_path / "out")
    config = AutoConfig.from_pretrained(run / "model")
    config.intermediate_size = 48
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "narrow")
    with pytest.raises(DataError, match=r"gate_proj\.weight in the shape \[64, 32\]; the model's is \[48, 32\]"):
        export_checkpoint(config_of(tmp_path / "narrow"), checkpoint, tmp_path / "out")
    (weights_file,) = checkpoint.glob("*.distcp")
    content = bytearray(weights_file.read_bytes())
    content[len(content) // 2] ^= 1
    weights_file.write_bytes(content)
    with pytest.raises(DataError, match=f"{weights_file.name} is damaged"):
        export_checkpoint(model, checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
