"""The example of a vision-language model, trained: pictures are seen by generator and learner alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.vision import prepare
from rollmesh.mesh.trajectory.image_files import IMAGES_NAME
from tests.integration.training import train

pytestmark = pytest.mark.slow


def test_squares_are_trained_in_batches_mixed_with_text(tmp_path: Path) -> None:
    data = tmp_path / "data"
    prepare.main(["--out", str(data), "--rows", "60", "--warm-steps", "5"])
    run = train(
        "examples/vision/vision.yaml",
        data,
        tmp_path,
        data__train=str(data / "train.jsonl"),
        learner__steps=3,
        learner__batch__groups=8,
        learner__optimizer__warmup_steps=1,
        logging__record=True,
    )
    assert min(run.metric("prompt_length/min")) == 2, "some prompts have no picture"
    assert max(run.metric("prompt_length/max")) == 21, "a picture's tokens count"
    # Generator and learner see the same: the first version's log-probs agree.
    assert run.metric("rollout_corr/kl")[0] == pytest.approx(0.0, abs=1e-4)
    assert any(path.is_file() for path in (tmp_path / "vision" / "side" / IMAGES_NAME).rglob("*"))
