"""Devices of roles with processes of their own: no one else's, or the run is refused with the numbers."""

from __future__ import annotations

import pytest

from rollmesh.launcher.placement.role_devices import assign_roles
from rollmesh.launcher.placement.visible import VisibleDevices
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import ConfigError

VISIBLE = VisibleDevices(tuple("01234"), 5, 5)
CRITIC, TEACHER = "learner.roles.critic={at: own, ranks: 2}", "learner.roles.teacher={at: own}"
KEY = "placement.devices.roles"


def config(*overrides: str) -> Config:
    return load_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}}, overrides)


def test_they_are_named_or_the_first_that_are_left() -> None:
    assert assign_roles(config(CRITIC, TEACHER), {0, 2}, VISIBLE) == {"critic": (1, 3), "teacher": (4,)}
    named = config(CRITIC, TEACHER, f"{KEY}.teacher=[1]")
    assert assign_roles(named, {0, 2}, VISIBLE) == {"critic": (3, 4), "teacher": (1,)}
    assert assign_roles(config(), {0}, VISIBLE) == {}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([CRITIC, TEACHER], r"role teacher needs 1 CUDA device.* only 0 of 5 are left"),
        ([CRITIC, f"{KEY}.critic=[3]"], "names 1 device.*2 are needed"),
        ([CRITIC, f"{KEY}.critic=[3, 3]"], "2 are needed"),
        ([CRITIC, f"{KEY}.critic=[3, 7]"], "no CUDA device 7, the last one here is 4"),
        ([CRITIC, f"{KEY}.critic=[2, 3]"], "device 2 has another user"),
        ([CRITIC, TEACHER, f"{KEY}.critic=[3, 4]", f"{KEY}.teacher=[4]"], "device 4 has another user"),
        ([f"{KEY}.critic=[3]"], "starts no processes for this role"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        assign_roles(config(*overrides), {0, 1, 2}, VISIBLE)
