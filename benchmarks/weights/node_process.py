"""A process of `benchmarks.weights.node`, spoken to in lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from benchmarks.common import REPOSITORY


class Host:
    """One process.

    Args:
        role: `learner` or `generator`.
        options: of the command line.
        inside: command that runs it elsewhere (`ip netns exec NAME`).

    Attributes:
        address: under which it serves.
    """

    def __init__(self, role: str, options: Sequence[str], inside: Sequence[str] = ()) -> None:
        command = [*inside, sys.executable, "-m", "benchmarks.weights.node", role, *options]
        self._process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address: str = self.receive()["address"]

    def send(self, request: dict[str, Any]) -> None:
        """Sends a request without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            RuntimeError: the process ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and waits for its answer."""
        self.send(request)
        return self.receive()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
