"""`rollmesh role NAME` as processes of a test's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollmesh.mesh.config import Config
from rollmesh.mesh.runtime.threads import thread_environment
from tests.repository import REPOSITORY


class RoleProcess:
    """`rollmesh role NAME`, again and again.

    Args:
        name: of the role.
        mesh: address of the buffer.
        folder: with `config.json`; for its log.
        arguments: further ones of the command.
        before: the beginning of the command line, where another command starts it.
        log_name: of its log; none: the role's.
    """

    def __init__(
        self,
        name: str,
        mesh: str,
        folder: Path,
        *,
        arguments: Sequence[str] = (),
        before: Sequence[str] = (),
        log_name: str | None = None,
    ) -> None:
        python = (sys.executable, "-m", "rollmesh.cli")
        self._command = [*before, *python, "role", name, str(folder / "config.json"), "--mesh", mesh, *arguments]
        self._log = folder / f"{log_name or name}.log"
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Starts it; it becomes a member once it has loaded."""
        environment = {**os.environ, **thread_environment(1), "PYTHONPATH": str(REPOSITORY)}
        with self._log.open("a") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        return self.process

    def kill_and_start(self) -> None:
        """Kills it without a word, and starts its successor."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.start()

    def log(self) -> str:
        """All that its processes have said."""
        return self._log.read_text()

    def end(self) -> None:
        """Kills it, where it has not ended."""
        self.process.kill()
        self.process.wait()


@contextmanager
def served(role: RoleProcess) -> Iterator[RoleProcess]:
    """A role for as long as the block runs."""
    try:
        yield role
    finally:
        role.end()


def write_config(config: Config, folder: Path) -> None:
    """Writes the configuration that the command reads."""
    (folder / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
