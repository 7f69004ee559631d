"""Reverb as a contender: its processes live in another environment and are spoken to in JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.buffer.plan import Plan
from benchmarks.common import REPOSITORY
from rollmesh.mesh.errors import ConfigError

PEER = REPOSITORY / "benchmarks" / "peers" / "reverb_queue.py"
# Where the environment is looked for when the command line does not say.
VARIABLE = "ROLLMESH_REVERB_PYTHON"


@dataclass(frozen=True, slots=True)
class PeerCell:
    """Results of a run.

    Attributes:
        items_s: trajectories sampled per second.
        p50_ms, p99_ms, latencies_ms: from insertion to the reader; every sample of a paced run.
        cpu_us: CPU microseconds per trajectory, by process.
    """

    items_s: float
    p50_ms: float
    p99_ms: float
    latencies_ms: list[float]
    cpu_us: dict[str, float]


class Reverb(AbstractContextManager["Reverb"]):
    """The peer's processes, for many cells.

    Args:
        python: interpreter of an environment that has dm-reverb.

    Raises:
        ConfigError: the peer does not start.
    """

    def __init__(self, python: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
        try:
            self._process = subprocess.Popen(
                [python, PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=environment, text=True,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(
                f"cannot run {python}: {error.strerror}", hint=f"see {PEER.name} for its needs"
            ) from error
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            tail = self._process.stderr.read().strip().splitlines()[-1:]
            raise ConfigError(f"Reverb's side ended: {' '.join(tail)}", hint=f"see {PEER.name} for its needs")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def measure(self, plan: Plan) -> PeerCell:
        """One cell under the same plan (groups do not exist there)."""
        assert self._process.stdin is not None
        wish = {
            "tokens": plan.tokens,
            "writers": plan.writers,
            "seconds": plan.seconds,
            "warmup": plan.warmup,
            "rate": plan.rate,
        }
        self._process.stdin.write(json.dumps(wish) + "\n")
        self._process.stdin.flush()
        return PeerCell(**self._answer())

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
