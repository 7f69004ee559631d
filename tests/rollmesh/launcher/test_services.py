"""The command lines and environments of a run's services."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rollmesh.launcher.devices import DevicePlan
from rollmesh.launcher.preparation import Preparation
from rollmesh.launcher.services import ServiceCatalogue
from rollmesh.mesh.config import load_config
from rollmesh.mesh.rpc.held_ports import ENVIRONMENT, HeldPorts
from rollmesh.mesh.runtime.threads import ThreadPlan


def test_each_is_started_at_a_port_that_nobody_else_can_have(tmp_path: Path) -> None:
    settings = ["buffer.fronts=2", "buffer.redis=redis://127.0.0.1:1", f"run.dir={tmp_path}"]
    asked = load_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}}, settings)
    with HeldPorts(asked.network.host) as held:
        catalogue = ServiceCatalogue(
            asked, Path("c.yaml"), ThreadPlan(1, 1, 1), Preparation(DevicePlan()), held, allow_changes=False
        )
        ports = set()
        for spec in (*catalogue.buffer(), *catalogue.further_fronts(), *catalogue.others("host:1")):
            assert ENVIRONMENT.items() <= spec.environment.items()
            first, again = (int(command[command.index("--port") + 1]) for command in map(spec.command, (False, True)))
            assert (first == again) == spec.name.startswith("buffer"), "members know the fronts by their addresses"
            ports |= {first, again}
        assert len(ports) == 2 + 2 * 3
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind((asked.network.host, port))
