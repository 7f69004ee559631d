"""SandboxFusion: a server that compiles and runs programs of many languages. Source: its `POST /run_code`."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmesh.reward_service.sandbox.interface import Job, Ran
from rollmesh.reward_service.sandbox.plugins.http_client import HttpClient
from rollmesh.reward_service.sandbox.plugins.turns import PluginExecutor
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError

_PATH = "/run_code"
# Our names of languages, and the server's.
_NAMES = {
    "python": "python",
    "cpp": "cpp",
    "javascript": "nodejs",
    "bash": "bash",
    "java": "java",
    "go": "go",
    "rust": "rust",
}
_COMPILE_S = 60.0
# Seconds for the way there and back, and for the server's own queue.
_ANSWER_S = 60.0


class SandboxFusion(PluginExecutor):
    """Programs run by a SandboxFusion server.

    Args:
        url: of the server.
        key_file, ca_file: see `HttpClient`.
        size: jobs at once; 0 for as many as this process has CPUs.

    Raises:
        ConfigError: as `HttpClient`.
    """

    def __init__(self, url: str, key_file: Path | None, size: int, *, ca_file: Path | None = None) -> None:
        super().__init__(frozenset(_NAMES), size)
        self._client = HttpClient(url, key_file, ca_file)

    def describe(self) -> str:
        """See `Executor.describe`."""
        return f"rung 4: SandboxFusion at {self._client.url}"

    async def close(self) -> None:
        """Ends all connections."""
        await self._client.close()

    async def _runs(self, job: Job, inputs: Sequence[bytes]) -> AsyncIterator[Ran]:
        for stdin in inputs:
            wall_s = min(job.limits.wall_s, job.deadline - time.monotonic())
            if wall_s <= 0:
                yield Ran("infrastructure", reason="the deadline has passed before the program was run")
                continue
            try:
                answer = await self._client.json(_PATH, _request(job, stdin, wall_s), wall_s + _COMPILE_S + _ANSWER_S)
                yield _ran(answer, job, in_full=wall_s == job.limits.wall_s)
            except UnavailableError as error:
                yield Ran("infrastructure", reason=str(error))


def _request(job: Job, stdin: bytes, wall_s: float) -> dict[str, Any]:
    others = {name: base64.b64encode(content).decode() for name, content in job.files.items() if name != job.argv[0]}
    return {
        "code": job.files[job.argv[0]].decode(errors="replace"),
        "language": _NAMES[job.language],
        "stdin": stdin.decode(errors="replace"),
        "files": others,
        "fetch_files": list(job.outputs),
        "compile_timeout": _COMPILE_S,
        "run_timeout": wall_s,
        "memory_limit_MB": job.limits.memory >> 20,
    }


def _ran(answer: Any, job: Job, *, in_full: bool) -> Ran:
    """The end of a program, from the server's answer.

    Raises:
        UnavailableError: it is no such answer.
    """
    try:
        if answer["status"] == "SandboxError":
            return Ran("infrastructure", reason=f"SandboxFusion: {answer.get('message') or 'an error of its own'}")
        result = answer["run_result"] or answer["compile_result"]
        stdout, stderr = ((result.get(name) or "").encode()[: job.limits.output] for name in ("stdout", "stderr"))
        cpu_s = float(result.get("execution_time") or 0.0)
        if result["status"] == "TimeLimitExceeded":
            if not in_full:
                return Ran("infrastructure", reason="the deadline has passed before the program's time was over")
            return Ran("wall", 0, stdout, stderr, cpu_s)
        code = int(result["return_code"])
        files = _files(answer.get("files") or {})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnavailableError(f"SandboxFusion's answer is not understood: {type(error).__name__}: {error}") from error
    end, number = ("exit", code) if code >= 0 else ("signal", -code)
    return Ran(end, number, stdout, stderr, cpu_s, files=files)  # type: ignore[arg-type]


def _files(given: Mapping[str, str]) -> dict[str, bytes]:
    try:
        return {name: base64.b64decode(content) for name, content in given.items()}
    except binascii.Error as error:
        raise ValueError(str(error)) from error
