"""A training continues as the one that was begun, or is refused by the names of what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.learner.trainers.identity import check_identity, identity_of
from rollmesh.mesh.errors import ConfigError
from rollmesh.trainers import read_trainer_config


def identity(folder: Path, *overrides: str) -> dict[str, str]:
    given = {"model": {"path": str(folder)}, "data": {"train": str(folder / "rows.jsonl")}}
    return identity_of("sft", read_trainer_config("sft", given, overrides))


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ("{rank: 4}", "{rank: 8}", "learner.lora.rank"),
        ("{rank: 4}", "{rank: 4, alpha: 8}", "learner.lora.alpha"),
        ("{rank: 4}", "{rank: 4, rank_stabilized: true}", "learner.lora.rank_stabilized"),
        ("{targets: [q_proj]}", "{targets: [q_proj, v_proj]}", "learner.lora.targets"),
        ("{rank: 4}", "null", "learner.lora"),
        ("null", "{rank: 4}", "learner.lora"),
    ],
)
def test_another_adapter_is_refused(tmp_path: Path, before: str, now: str, named: str) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    begun = identity(tmp_path, f"learner.lora={before}")
    with pytest.raises(ConfigError) as caught:
        check_identity(tmp_path, begun, identity(tmp_path, f"learner.lora={now}"))
    assert caught.value.message.endswith(f"begun with something else: {named}")
    check_identity(tmp_path, begun, identity(tmp_path, f"learner.lora={before}"))


def test_the_first_values_of_an_adapter_may_have_been_removed(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    begun = identity(tmp_path, f"learner.lora={{start_from: {tmp_path}}}")
    check_identity(tmp_path, begun, identity(tmp_path, "learner.lora={}"))
