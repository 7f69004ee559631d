"""`rollmesh role NAME` as processes of a test's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollmesh.mesh.config import Config
from rollmesh.mesh.runtime.threads import thread_environment
from tests import fork_server
from tests.faults.namespace import arguments_in


class RoleProcess:
    """`rollmesh role NAME`, again and again.

    Args:
        name: of the role.
        mesh: address of the buffer.
        folder: with `config.json`; for its log.
        arguments: further ones of the command.
        namespace: network namespace that it enters; empty: none.
        log_name: of its log; none: the role's.
    """

    def __init__(
        self,
        name: str,
        mesh: str,
        folder: Path,
        *,
        arguments: Sequence[str] = (),
        namespace: str = "",
        log_name: str | None = None,
    ) -> None:
        self._arguments = ["role", name, str(folder / "config.json"), "--mesh", mesh, *arguments]
        self._namespace = namespace
        self._log = folder / f"{log_name or name}.log"
        self.process = self._start()

    def _start(self) -> fork_server.RunningCommand:
        """Starts it; it becomes a member once it has loaded."""
        with self._log.open("ab") as log:
            place = arguments_in(self._namespace, 0, self._arguments)
            return fork_server.popen(stdout=log, stderr=log, env={**os.environ, **thread_environment(1)}, **place)

    def kill_and_start(self) -> None:
        """Kills it without a word, and starts its successor."""
        self.end()
        self.process = self._start()

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
