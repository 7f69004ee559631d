"""The layout of ranks is checked before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmesh.learner.layout_requirements import check_layout
from rollmesh.mesh.config import load_config
from rollmesh.mesh.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["learner.parallel.shards=3"], "learner.parallel.shards: 3 does not divide the learner's 4 ranks"),
        (["learner.parallel.sp=3"], "learner.parallel.sp: 3 does not divide the learner's 4 ranks"),
        (["learner.parallel.sp=4"], "learner.parallel.sp: 4 does not divide the 6 attention heads of model"),
        (["learner.parallel={shards: 2, sp: 2}"], None),
        (["learner.parallel.shards=3", "learner.engine=mine"], None),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(tmp_path: Path, overrides: list[str], said: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 6}))
    settings = {"model": {"path": str(tmp_path)}, "data": {"train": "t.jsonl"}, "learner": {"ranks": 4}}
    config = load_config(settings, overrides)
    if said is None:
        check_layout(config)
        return
    with pytest.raises(ConfigError) as refused:
        check_layout(config)
    assert refused.value.message.startswith(said)
