"""Models that take images: proven at the start, frozen in parts, and refused by name where they cannot be computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.learner.tiny_models import WITH_IMAGES, save_model
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.types import TrainSequence
from rollmesh.learner.vision.families import FAMILIES
from rollmesh.learner.vision.tower import RowImages, VisionTower
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.testing.engine_cases import critic_loss, make_sequences, train, weights
from tests.learner.engines.models import make_critic, make_engine

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llava"), "llava")


@pytest.mark.parametrize("architecture", WITH_IMAGES)
def test_images_are_computed_as_transformers_computes_them(tmp_path: Path, architecture: str) -> None:
    evidence = make_engine(save_model(tmp_path, architecture)).probe()
    assert evidence.truth.outputs < 1e-5
    assert evidence.truth.gradient is not None
    assert evidence.truth.gradient < 1e-5
    assert architecture in FAMILIES


@pytest.mark.parametrize("architecture", ["llava", "qwen2_5_vl"])
def test_values_see_images_as_transformers_does(tmp_path: Path, architecture: str) -> None:
    critic = make_critic(save_model(tmp_path, architecture))
    evidence = critic.probe()
    assert evidence.truth.outputs < 1e-5
    assert evidence.truth.gradient is not None
    assert evidence.truth.gradient < 1e-5
    before = weights(critic)
    # The first step moves the head alone, which is 0 before it.
    for seed in (1, 2):
        train(critic, mixed(critic, seed), critic_loss)
    changed = {name for name, tensor in weights(critic).items() if not torch.equal(tensor, before[name])}
    assert any("vision_tower" in name or "visual" in name for name in changed)


def test_features_at_other_places_are_noticed(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embed = VisionTower.embed

    def misplaced(self: VisionTower, input_ids: torch.Tensor, of_row: RowImages) -> torch.Tensor:
        images = replace(of_row.images, places=of_row.images.places.flip(0))
        return embed(self, input_ids, RowImages(images))

    monkeypatch.setattr(VisionTower, "embed", misplaced)
    with pytest.raises(DataError, match="cannot be trained with images"):
        make_engine(llava).probe()


def test_positions_that_ignore_the_grid_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path, "qwen2_5_vl")
    engine = make_engine(folder)
    engine.probe()
    monkeypatch.setattr("rollmesh.learner.batching.types.PromptImages.shift", 0)
    with pytest.raises(DataError, match="cannot be trained with images"):
        engine.probe()


def mixed(engine, seed: int) -> list[TrainSequence]:
    """Sequences of which some have images."""
    images = engine._runner.probe_images()
    found = []
    for index, sequence in enumerate(make_sequences(seed)):
        response = sequence.response_ids.clip(8)
        prompt, of_prompt = sequence.prompt_ids.clip(8), None
        if index % 3 == 0:
            prompt, of_prompt = images.add(prompt, index)
        found.append(
            TrainSequence(prompt, response, sequence.response_mask, sequence.behaviour_log_probs, 1.0, images=of_prompt)
        )
    return found


def test_frozen_parts_stay_as_they_are(llava: Path) -> None:
    engine = make_engine(llava, frozen=("vision_tower", "layers.0"))
    before = weights(engine)
    train(engine, mixed(engine, 1))
    changed = {name for name, tensor in weights(engine).items() if not torch.equal(tensor, before[name])}
    assert any("multi_modal_projector" in name for name in changed), "images reach what joins the two parts"
    assert any("language_model.layers.1." in name for name in changed)
    assert not [name for name in changed if "vision_tower" in name or "layers.0." in name]


def test_a_trained_tower_changes_by_images_alone(llava: Path) -> None:
    engine = make_engine(llava)
    before = weights(engine)
    train(engine, mixed(engine, 1))
    changed = [name for name, tensor in weights(engine).items() if not torch.equal(tensor, before[name])]
    assert any("vision_tower" in name for name in changed)


def test_outputs_with_images_do_not_depend_on_the_micro_batch(llava: Path) -> None:
    engine = make_engine(llava)
    sequences = mixed(engine, 2)
    together = engine.infer([pack(sequences)])[0].policy()[0]
    apart = torch.cat([output.policy()[0] for output in engine.infer([pack([each]) for each in sequences])])
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_is_refused_by_name(llava: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner.frozen.*no part 'eyes'") as unknown:
        make_engine(llava, frozen=("eyes",))
    assert "vision_tower" in unknown.value.hint
    with pytest.raises(ConfigError, match="left to train"):
        make_engine(llava, frozen=("model", "lm_head"))
