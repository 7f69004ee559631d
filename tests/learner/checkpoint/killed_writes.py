"""Learners of one run, one after the other, each killed one operation on a file later than the one before.

Each looks for the last checkpoint as its successor would, loads it, and writes the next. All are forked by one process,
which has torch already.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rollmesh.learner.checkpoint.retention import prune, sweep
from rollmesh.learner.checkpoint.store import CheckpointStore, load_checkpoint
from rollmesh.learner.engines.fsdp2.optimizer_state import saved_state
from rollmesh.learner.engines.layout import Layout
from rollmesh.learner.engines.tensors.state import StateWriter, load_state
from rollmesh.learner.engines.world import World
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.runtime.ranks import environment_of
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.learner.checkpoint.file_operations import FileOperations

LIFE_S = 240
_WIDTH = 16


@dataclass
class Life:
    """A learner's.

    Attributes:
        incarnation: its own.
        found: name and version of the checkpoint that it has loaded.
        died: the operation before which its victim was killed; empty: the victim has done all of them.
        committed: what it has told the buffer.
        told: the outcome of each rank that was not killed.
        left: the folder after it.
    """

    incarnation: int
    found: str = ""
    died: str = ""
    committed: str = ""
    told: list[str] = field(default_factory=list)
    left: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Case:
    """Learners and their kills.

    Attributes:
        ranks: of each learner.
        victim: the rank that is killed.
        every: of `FileOperations`.
        stride: operations by which a kill comes later than the one before.
    """

    ranks: int = 1
    victim: int = 0
    every: int = 32
    stride: int = 1


def live_and_die(root: Path, case: Case, answer: Connection) -> None:
    """Lives until a victim has outlived all of its operations; sends what was seen of each.

    Args:
        root: folder of the checkpoints; there is none yet.
        case: the learners.
        answer: gets a list of `Life`; the first one's is not cut short.
    """
    lives = [_live(root, 1, case, 0)]
    while len(lives) == 1 or lives[-1].died:
        lives.append(_live(root, len(lives) + 1, case, 1 + case.stride * (len(lives) - 1)))
    answer.send(lives)


def _live(root: Path, incarnation: int, case: Case, fatal: int) -> Life:
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        children: list[int] = []
        for rank in range(case.ranks):
            if child := os.fork():
                children.append(child)
                continue
            os.close(reading)
            os.environ.update(environment_of(rank, case.ranks, Path(folder) / "meeting"))
            _end(_Learner(root, incarnation, writing), fatal if rank == case.victim else 0, case.every)
        os.close(writing)
        with os.fdopen(reading) as told:
            lines = [line.split(": ", 1) for line in told.read().splitlines()]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    said = {kind: text for kind, text in lines if kind != "told"}
    life = Life(incarnation, **said, told=[text for kind, text in lines if kind == "told"])
    expected = [-signal.SIGKILL if life.died and rank == case.victim else 0 for rank in range(case.ranks)]
    assert statuses == expected, lines
    life.left = {path.name for path in root.iterdir()}
    return life


def _end(learner: _Learner, fatal: int, every: int) -> NoReturn:
    """The life of a forked process."""
    signal.alarm(LIFE_S)
    status = 1
    try:
        learner.run(fatal, every)
        status = 0
    except (RollmeshError, RuntimeError) as error:
        # A rank without the other, which a learner's watch would end too.
        learner.tell("told", type(error).__name__)
        status = 0
    except BaseException as error:  # noqa: BLE001 - nothing may return into the process that forked this one
        learner.tell("told", repr(error))
    finally:
        os._exit(status)


class _Engine:
    """A matrix and its moments, all of them the number of the version."""

    trained = True

    def __init__(self) -> None:
        torch.set_num_threads(1)
        processes = int(os.environ["WORLD_SIZE"])
        self.world = World("cpu", need_group=False, timeout_s=LIFE_S)
        self.layout = Layout.of_neighbours(self.world.process, processes)
        self._model: nn.Module = nn.Linear(_WIDTH, _WIDTH, bias=False)
        if processes > 1:
            fully_shard(self._model, mesh=init_device_mesh("cpu", (processes,)))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._writer = StateWriter(self.world)

    def begin_checkpoint(self, folder: Path, extra: dict[str, object]) -> Future[None]:
        return self._writer.begin(folder, self._state(), 1, extra)

    def load_checkpoint(self, folder: Path) -> dict[str, object]:
        return load_state(folder, self.world, self._state())[1]

    def _state(self) -> dict[str, Any]:
        return saved_state(self._model.named_parameters(), self._optimizer)

    def _tensors(self) -> Sequence[Any]:
        (parameter,) = self._model.parameters()
        state = self._optimizer.state[parameter]
        tensors = (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
        return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]

    def become(self, version: int) -> None:
        if not self._optimizer.state:
            for parameter in self._model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self._optimizer.step()
        for tensor in self._tensors():
            tensor.fill_(version)

    def is_at(self, version: int) -> bool:
        return all(bool((tensor == version).all()) for tensor in self._tensors())


class _Learner:
    def __init__(self, root: Path, incarnation: int, pipe: int) -> None:
        self._root = root
        self._incarnation = incarnation
        self._pipe = pipe

    def tell(self, kind: str, text: str) -> None:
        os.write(self._pipe, f"{kind}: {text}\n".encode())

    def run(self, fatal: int, every: int) -> None:
        """Continues from the last checkpoint and writes the next; `fatal`: 0 of ranks that are not killed."""
        engine: Any = _Engine()
        store = CheckpointStore(self._root)
        engines = {"actor": engine}
        leads = engine.layout.leads
        if leads:
            sweep(self._root, self._incarnation)
            unfinished = [path.name for path in self._root.glob(".*-i*")]
            assert not unfinished, f"{unfinished} survive the start"
        engine.world.barrier()
        version = 0
        if complete := store.list():
            policy, folder = complete[-1]
            version = policy.version
            assert load_checkpoint(engines, folder) == {"incarnation": policy.incarnation, "version": version}
            assert engine.is_at(version), f"{folder.name} holds another state"
            if leads:
                self.tell("found", folder.name)
        engine.become(version + 1)
        engine.world.barrier()
        if fatal:
            operations = FileOperations(self._root, fatal, lambda name: self.tell("died", name), every=every)
        folder = store.begin(engines, PolicyVersion(self._incarnation, version + 1), {}).result(LIFE_S)
        if leads:
            # In the buffer's place: what it has been told is durable.
            if fatal:
                operations.count("commit")
            self.tell("committed", folder.name)
            prune(self._root, committed=folder.name, keep=1)
