"""The end of a run, as far as it is known: schedules end there."""

from __future__ import annotations

import pytest

from rollmesh.learner.coordinator.run_end import planned_end
from rollmesh.mesh.config import Config, load_config


def make(*overrides: str) -> Config:
    return load_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}}, overrides)


@pytest.mark.parametrize(
    ("steps", "prompts", "end"), [(100, None, 100), (100, 32, 8), (100, 33, 9), (5, 32, 5), (100, 3, 1)]
)
def test_a_run_ends_with_its_steps_or_with_its_data(steps: int, prompts: int | None, end: int) -> None:
    config = make(f"learner.steps={steps}", "learner.batch.groups=4")
    assert planned_end(config, prompts) == end
    for version in range(end):
        assert planned_end(config, prompts, version=version, used=4 * version) == end, "where it was stopped"


@pytest.mark.parametrize(("groups", "end"), [(2, 12), (4, 8), (8, 6), (100, 5)])
def test_batches_of_another_size_since_a_resume_move_the_end(groups: int, end: int) -> None:
    config = make(f"learner.batch.groups={groups}")
    assert planned_end(config, 32, version=4, used=16) == end


def test_groups_that_are_used_again_make_as_many_steps() -> None:
    config = make("learner.batch.groups=4", "buffer.max_staleness=1", "buffer.max_reuse=2")
    assert planned_end(config, 32) == 16
    assert planned_end(config, 32, version=6, used=24) == 16
