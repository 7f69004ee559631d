"""Learners of one run, one after the other, each of which meets a fault of its own; a program of `test_killed_saving`.

It imports what a learner needs, once, and forks a process for each fault whose name it reads; it answers how that
process ended. A fault may change the configuration of its checkpoints.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import rollmesh.learner.coordinator.checkpoint_scheduler
from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.checkpoint import retention, store
from rollmesh.learner.coordinator.checkpoint_scheduler import CheckpointScheduler
from rollmesh.learner.engines.fsdp2 import step
from rollmesh.learner.engines.fsdp2.engine import Fsdp2Engine
from rollmesh.learner.engines.tensors.state import StateWriter
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

    def clip(_parameters: Any, _most: float) -> float:
        next(left)()
        return float("nan")

    step.clip_gradients = clip


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


def killed_three_steps_into_a_write() -> Mapping[str, Any]:
    store._rename = lambda *_: threading.Event().wait()  # type: ignore[assignment]
    return _written_by_time(3, die)


def killed_after_a_late_commit() -> Mapping[str, Any]:
    """Its checkpoint is whole and committed three steps after its version."""
    rename, claimed = store._rename, threading.Event()

    def held(unfinished: Path, final: Path) -> None:
        claimed.wait()
        rename(unfinished, final)

    store._rename = held
    rollmesh.learner.coordinator.checkpoint_scheduler.prune = die
    return _written_by_time(3, claimed.set)


def _written_by_time(steps: int, action: Callable[[], object]) -> Mapping[str, Any]:
    """Checkpoints for which no step waits, the first one after a step; gives their configuration.

    Does something once the groups of so many further steps are used.
    """
    claim, versions = BufferClient.claim, itertools.count(-1)
    write = CheckpointScheduler.write_if_due

    async def counted(*arguments: Any) -> Any:
        granted = await claim(*arguments)
        if next(versions) == steps - 1:
            action()
        return granted

    def write_after_a_step(self: CheckpointScheduler, version: int, *, healthy: bool) -> float:
        return write(self, version, healthy=healthy) if version > self._progress.resumed_at else 0.0

    BufferClient.claim = counted  # type: ignore[method-assign]
    CheckpointScheduler.write_if_due = write_after_a_step  # type: ignore[method-assign]
    return {"every_steps": None, "every_s": 1e-9}


def none() -> None:
    """It trains to the end."""


FAULTS: dict[str, Callable[[], Mapping[str, Any] | None]] = {
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
        killed_three_steps_into_a_write,
        killed_after_a_late_commit,
        none,
    )
}


def main(config_file: Path, mesh: str) -> None:
    config = Config.model_validate_json(config_file.read_text(encoding="utf-8"))
    for line in sys.stdin:
        child = os.fork()
        if not child:
            changes = FAULTS[line.strip()]() or {}
            section = config.checkpoint.model_copy(update=changes)
            status = run(config.model_copy(update={"checkpoint": section}), mesh, takeover=True)
            sys.stderr.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
