"""Settings in environment variables: found, refused, and kept from services that a launcher starts."""

from __future__ import annotations

import pytest

from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.variables import (
    OPTIONS,
    check_variables,
    key_variable,
    option_variable,
    overrides_from,
    without_settings,
)
from rollmesh.mesh.errors import ConfigError

# Variables of deployments, and the project's own between its processes.
FOREIGN = [
    f"ROLLMESH_{name}"
    for name in (
        *("CONFIG", "DATA", "ENGINE", "GENERATOR_IMAGE", "IMAGE", "MODEL", "PERMANENT_EXIT_CODE", "PORT_IS_HELD"),
        *("RANKS_MEET_IN", "REPLICAS", "SECRETS", "STARTED_RANK", "TEST_HOLD", "TOKEN"),
    )
]
FILE = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "learner": {"ranks": 1, "steps": 5}}


def test_variables_go_before_the_file_and_after_the_command_line() -> None:
    environment = {"ROLLMESH__LEARNER__STEPS": "7", "ROLLMESH__REWARD__FUNCTIONS": "[none]", "HOME": "/"}
    config = load_config(FILE, [*overrides_from(environment), "--learner.steps=9"])
    assert (config.learner.steps, config.reward.functions) == (9, ["none"])
    assert load_config(FILE, overrides_from(environment)).learner.steps == 7


def test_names() -> None:
    assert key_variable("network.metrics_host") == "ROLLMESH__NETWORK__METRICS_HOST"
    assert overrides_from({"ROLLMESH__NETWORK__METRICS_HOST": "::1"}) == ["--network.metrics_host=::1"]
    assert option_variable("ready-file") == "ROLLMESH_READY_FILE"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("ROLLMESH__LEARNR__RANKS", "ROLLMESH__LEARNER__RANKS"),
        ("ROLLMESH__NETWORK__HOTS", "ROLLMESH__NETWORK__HOST"),
        ("ROLLMESH__SECURITY__TOKENFILE", "ROLLMESH__SECURITY__TOKEN_FILE"),
        ("ROLLMESH_JION", "ROLLMESH_JOIN"),
        ("ROLLMESH_READYFILE", "ROLLMESH_READY_FILE"),
    ],
)
def test_a_variable_that_would_be_ignored_is_refused_with_the_nearest_name(wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"{wrong}.*did you mean {meant}"):
        check_variables({wrong: "x"})


def test_known_variables_and_those_of_deployments_pass() -> None:
    known = {key_variable(key): "x" for key in ("network.host", "security.token_file", "loss.beta", "learner.ranks")}
    check_variables({**known, **{option_variable(name): "x" for name in OPTIONS}, **dict.fromkeys(FOREIGN, "x")})


def test_services_of_a_launcher_see_no_settings() -> None:
    kept = {"PATH": "/bin", "ROLLMESH_PORT_IS_HELD": "1"}
    assert without_settings({**kept, "ROLLMESH__RUN__NAME": "a", "ROLLMESH_JOIN": "b", "ROLLMESH_PORT": "1"}) == kept
