"""Prompts with images of a plan: read by their digests, with the tokens that were answered, or not trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollmesh.learner.distributed.prompt_images import PromptImageSource, read_prompts
from rollmesh.learner.distributed.train_plan import PlannedPrompt
from rollmesh.learner.vision.prompts import PromptReader
from rollmesh.mesh.errors import DataError, PayloadError
from rollmesh.mesh.trajectory.image_files import ImageFiles
from rollmesh.mesh.trajectory.images import digest_tokens
from tests.generators.engines.tiny_vlm import IMAGE, TinyVlm, picture

TEXT = PlannedPrompt(np.array([3, 4], "<i4").tobytes(), 1.0)


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> TinyVlm:
    return TinyVlm(tmp_path_factory.mktemp("vlm"), "idefics3")


@pytest.fixture
def source(vlm: TinyVlm, tmp_path: Path) -> PromptImageSource:
    found = PromptImageSource.load(vlm.folder, tmp_path)
    assert found is not None
    return found


def planned(vlm: TinyVlm, folder: Path, *seeds: int) -> PlannedPrompt:
    """A prompt with an image for each seed."""
    ids = [3, *[IMAGE, 5] * len(seeds)]
    seen = [3, *[*vlm.wide, 5] * len(seeds)]
    digests = ImageFiles(folder).write(picture(seed) for seed in seeds)
    return PlannedPrompt(np.array(ids, "<i4").tobytes(), 1.0, images=digests, seen=digest_tokens(seen))


def test_a_prompt_is_read_as_it_was_answered(vlm: TinyVlm, source: PromptImageSource, tmp_path: Path) -> None:
    found = read_prompts([TEXT, planned(vlm, tmp_path, 1, 2), TEXT], [0, 1], source)
    assert found.keys() == {0, 1}
    ids, images = found[1]  # type: ignore[misc]  # not an error
    assert ids.tolist() == [3, *vlm.wide, 5, *vlm.wide, 5]
    assert images is not None
    assert ids[images.places].tolist() == [IMAGE] * vlm.wide.count(IMAGE) * 2
    assert images.inputs["pixel_values"].shape == (2, 3, 28, 28)
    assert images.positions is None
    assert found[0][1] is None  # type: ignore[index]  # not an error


def test_what_cannot_be_read_is_the_outcome_of_its_prompt(
    vlm: TinyVlm, source: PromptImageSource, tmp_path: Path
) -> None:
    good = planned(vlm, tmp_path, 1)
    lost = PlannedPrompt(good.ids, 1.0, images=["0" * 32], seen=good.seen)
    others = PlannedPrompt(good.ids, 1.0, images=good.images, seen="0" * 16)
    found = read_prompts([good, lost, others], range(3), source)
    assert isinstance(found[0], tuple)
    assert isinstance(found[1], DataError)
    assert "no image at" in found[1].message
    assert isinstance(found[2], PayloadError)
    assert "not those of the learner's processor" in found[2].message
    blind = read_prompts([good, TEXT], [0, 1], None)
    assert isinstance(blind[0], DataError)
    assert isinstance(blind[1], tuple)


def test_a_model_of_text_alone_has_no_reader(tmp_path: Path, vlm: TinyVlm) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert PromptReader.load(tmp_path) is None
