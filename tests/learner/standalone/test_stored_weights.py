"""A stored model is published as the engine that wrote it publishes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.model_files.adapter_folder import CONFIG_NAME
from rollmesh.learner.standalone.stored_weights import publish_stored
from rollmesh.learner.weights import WeightPublisher
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights.tensors import named_tensors
from rollmesh.testing.engine_cases import assert_same, make_sequences, train
from tests.learner.engines.models import make_model, make_spec

_LORA = LoraSection(rank=2, alpha=8.0)


@pytest.fixture
def publisher() -> Iterator[WeightPublisher]:
    publisher = WeightPublisher("run", {})
    yield publisher
    publisher.close()


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), request.param)


def config_of(model: Path, lora: LoraSection | None = None) -> Config:
    values = {"model": {"path": str(model)}, "data": {"train": "t", "eval": "e"}}
    return load_config({**values, "learner": {"lora": None if lora is None else lora.model_dump()}})


def published(publisher: WeightPublisher, config: Config, weights: Path | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a version, as generators receive them."""
    before = publisher.newest.policy.version if publisher.newest is not None else -1
    policy = PolicyVersion(1, before + 1)
    publish_stored(publisher, policy, config, weights)
    version = publisher.version(policy)
    return {name: tensor.clone() for name, tensor in named_tensors(version.manifest, version.data.view())}


@pytest.mark.parametrize("lora", [None, _LORA], ids=["full", "lora"])
def test_a_checkpoint_is_published_as_the_folder_that_its_engine_writes(
    publisher: WeightPublisher, model: Path, tmp_path: Path, lora: LoraSection | None
) -> None:
    engine = create_engine(make_spec(model, lora=lora))
    try:
        train(engine, make_sequences(1))
        store = CheckpointStore(tmp_path / "checkpoints")
        store.begin({"actor": engine}, PolicyVersion(1, 1), {}).result(240)
        engine.export_hf(tmp_path / "exported")
    finally:
        engine.close()
    (checkpoint,) = (path for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    found = published(publisher, config_of(model, lora), checkpoint)
    assert_same(found, published(publisher, config_of(tmp_path / "exported")), 1e-6)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert_same(found, {name: tensor.detach() for name, tensor in loaded.named_parameters()}, 1e-6)
    initial = published(publisher, config_of(model))
    assert any(not torch.equal(found[name], tensor) for name, tensor in initial.items())


def test_other_folders_and_half_an_adapter_are_refused(publisher: WeightPublisher, model: Path, tmp_path: Path) -> None:
    policy = PolicyVersion(1, 0)
    with pytest.raises(DataError, match="neither a checkpoint nor an adapter"):
        publish_stored(publisher, policy, config_of(model), tmp_path)
    (tmp_path / CONFIG_NAME).write_text('{"r": 2, "lora_alpha": 4}')
    with pytest.raises(DataError, match=r"adapter_model\.safetensors cannot be read"):
        publish_stored(publisher, policy, config_of(model), tmp_path)
    assert publisher.newest is None
