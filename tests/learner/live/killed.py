"""Learners of one run, one after the other, each of which meets a fault of its own; a program of `test_killed_saving`.

It imports what a learner needs, once, and forks a process for each fault whose name it reads; it answers how that
process ended.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import rollmesh.learner.coordinator.checkpoint_scheduler
from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.checkpoint import retention, store
from rollmesh.learner.engines.fsdp2.engine import Fsdp2Engine
from rollmesh.learner.engines.fsdp2.state import StateWriter
from rollmesh.learner.engines.fsdp2.step import TrainingStep
from rollmesh.learner.service import run
from rollmesh.mesh.config import Config
from rollmesh.protos import buffer_pb2


def die(*_: Any, **__: Any) -> NoReturn:
    """As a crash, or the kernel short of memory, would have it."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def end() -> None:
    """Asks for an orderly end after the present step."""
    os.kill(os.getpid(), signal.SIGTERM)


def first_claim_refused() -> None:
    claim = BufferClient.claim

    async def lose_a_lease_first(self: BufferClient, table: str, incarnation: int, version: int, leases: Any) -> Any:
        await self.nack(table, incarnation, leases[:1], buffer_pb2.NACK_DISPOSITION_RELEASE)
        end()
        return await claim(self, table, incarnation, version, leases)

    BufferClient.claim = lose_a_lease_first  # type: ignore[method-assign]


def first_steps_not_finite() -> None:
    left = iter([lambda: None, end])

    def clip(_step: TrainingStep, _most: float) -> float:
        next(left)()
        return float("nan")

    TrainingStep._clip = clip  # type: ignore[method-assign]


def killed_while_it_copies() -> None:
    Fsdp2Engine.begin_checkpoint = die  # type: ignore[method-assign]


def killed_while_it_writes() -> None:
    StateWriter._finish = die  # type: ignore[method-assign]


def killed_before_the_digests() -> None:
    store.write_digests = die


def killed_before_the_rename() -> None:
    store._rename = die


def killed_before_the_commit() -> None:
    BufferClient.commit = die  # type: ignore[method-assign]


def killed_after_the_commit() -> None:
    rollmesh.learner.coordinator.checkpoint_scheduler.prune = die


def killed_while_it_removes() -> None:
    retention.shutil = SimpleNamespace(rmtree=die)  # type: ignore[assignment]


def none() -> None:
    """It trains to the end."""


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        first_claim_refused,
        first_steps_not_finite,
        killed_while_it_copies,
        killed_while_it_writes,
        killed_before_the_digests,
        killed_before_the_rename,
        killed_before_the_commit,
        killed_after_the_commit,
        killed_while_it_removes,
        none,
    )
}


def main(config_file: Path, mesh: str) -> None:
    config = Config.model_validate_json(config_file.read_text(encoding="utf-8"))
    for line in sys.stdin:
        child = os.fork()
        if not child:
            FAULTS[line.strip()]()
            status = run(config, mesh, takeover=True)
            sys.stderr.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
