"""A role's process refuses what it cannot serve before it loads anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.learner.role_service import service
from rollmesh.mesh.errors import ConfigError
from tests.learner.live.tiny import make_config


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("teacher", {}, "algorithm ppo has no role 'teacher' (its roles: critic)"),
        ("critic", {}, "learner.roles.critic.at is learner"),
        ("critic", {"learner.roles": {"critic": {"at": "own", "engine": "none"}}}, "no engine 'none'"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name(
    tmp_path: Path, capfd: Any, name: str, changes: dict[str, Any], words: str
) -> None:
    config = make_config(tmp_path, {"algorithm.name": "ppo", **changes})
    assert service.run(config, name, "127.0.0.1:9") == ConfigError.exit_code
    assert words in capfd.readouterr().err
