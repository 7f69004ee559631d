"""An argument that lets code into a server reaches its command line only where it counts as code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.generators.engines.sglang import server_args
from rollmesh.generators.engines.types import EngineSettings
from rollmesh.mesh.access.code_permissions import requested_code
from rollmesh.mesh.config import Config


def _configured(options: dict[str, Any]) -> Config:
    """As a front sends it."""
    config = Config.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": "data.jsonl"},
            "rollout": {"engine": "sglang", "sglang": {"options": options}},
        }
    )
    return Config.model_validate_json(config.model_dump_json())


def _arguments(options: dict[str, Any]) -> list[str]:
    section = _configured(options).rollout.sglang
    return server_args.command(Path("model"), EngineSettings(), section, port=1, context=8, vocabulary=9)


@pytest.mark.parametrize(
    "name", ["trust_remote_code", "--trust-remote-code", "trust-remote-cod", "enable_custom_logit_processor"]
)
@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}, [[]], [None], [False], True], ids=repr)
def test_a_switch_that_lets_code_in_counts_whatever_its_value_is(name: str, value: Any) -> None:
    is_off = value is None or value is False
    assert bool(requested_code(_configured({name: value}))) is not is_off
    if is_off:
        assert _arguments({name: value}) == _arguments({})


def test_an_empty_list_is_no_argument() -> None:
    assert _arguments({"cuda-graph-bs": []}) == _arguments({})
    assert _arguments({"cuda-graph-bs": [1, 2]})[-3:] == ["--cuda-graph-bs", "1", "2"]
