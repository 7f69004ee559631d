"""`rollmesh run` of services that only live.

`python -m tests.rollmesh.fake_run [--leads-session] FOLDER [ARGUMENT OF THE LEARNER ...]`. Its launcher is the real one
and runs in the main thread of this process. With the option it leads the session of the terminal that is its stdout.
"""

from __future__ import annotations

import fcntl
import sys
import termios
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rollmesh.launcher import local
from rollmesh.launcher.placement.devices import DevicePlan
from rollmesh.launcher.placement.preparation import Preparation
from rollmesh.launcher.service_process import ServiceSpec
from rollmesh.launcher.services import BUFFER, LEARNER
from rollmesh.mesh.config import load_config
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from tests.rollmesh.fake_spec import fake_spec


class Catalogue:
    """In place of a run's services."""

    def __init__(self, folder: Path, learner: Sequence[str]) -> None:
        self._folder = folder
        self._learner = learner

    def buffer(self) -> list[ServiceSpec]:
        return [fake_spec(self._folder, BUFFER)]

    def others(self, _mesh: str) -> list[ServiceSpec]:
        return [fake_spec(self._folder, LEARNER, *self._learner, completes_run=True)]


def main() -> int:
    if sys.argv[1] == "--leads-session":
        sys.argv.pop(1)
        fcntl.ioctl(1, termios.TIOCSCTTY)
    folder = Path(sys.argv[1])
    config = load_config(
        {
            "run": {"name": folder.name, "dir": str(folder.parent)},
            "model": {"path": "no/model"},
            "data": {"train": "no.jsonl"},
            "algorithm": "grpo",
        }
    )

    def catalogue(*_: Any, **__: Any) -> Catalogue:
        return Catalogue(folder, sys.argv[2:])

    local.ServiceCatalogue = catalogue  # type: ignore[assignment,misc]
    local.check_files = lambda _: None
    local.check_code = lambda *_, **__: Preparation(DevicePlan())  # type: ignore[assignment]
    try:
        with ForkServer.fork_here(()) or nullcontext() as fork_server:
            return local.run_locally(config, fork_server=fork_server)
    except RollmeshError as error:
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
