"""Worlds: the processes in which engines of a layout are tested, kept for a whole session of tests.

A world of one process is the test's own. Layouts of as many processes share them. For larger ones a server imports
torch, transformers and Megatron-Core once and forks their processes. They meet over loopback, and run what they are
sent.

Invariant: a call in several processes ends within its deadline, with every process's answer or with an error. After a
hang or a crash the next call begins with new processes. One in the test's own process has no deadline.
"""

from __future__ import annotations

import gc
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from rollmesh.learner.engines.interface import Engine, EngineSpec
from rollmesh.learner.engines.registry import ModelType, create_engine
from rollmesh.learner.engines.world import World
from rollmesh.mesh.runtime.memory_tuning import freeze_heap
from rollmesh.mesh.runtime.ranks import environment_of

# A process has one such server. Tests that may start it first import these too.
IMPORTED_ONCE = (
    "rollmesh.testing.worlds",
    "rollmesh.testing.imported_models",
    "rollmesh.testing.imported_megatron",
)
# For what hangs: other programs may have the cores.
_DEADLINE_S = 300.0

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """A way to lay out an engine.

    Attributes:
        name: in the names of tests.
        processes: of the learner.
        backend: of `rollmesh.learner.engines.registry`.
        changes: the fields of `EngineSpec` that make the layout.
    """

    name: str
    processes: int = 1
    backend: str = "fsdp2"
    changes: Mapping[str, Any] = field(default_factory=dict)


class Harness:
    """Makes engines of a layout in one process, and closes them at the end.

    Args:
        layout: of all of them.
    """

    def __init__(self, layout: EngineLayout) -> None:
        self._layout = layout
        self._closers = ExitStack()

    def make(self, spec: EngineSpec, model_type: ModelType = "language_model") -> Engine:
        """An engine; collective."""
        spec = replace(spec, **self._layout.changes)
        engine = create_engine(spec, model_type=model_type, backend=self._layout.backend)
        self._closers.callback(engine.close)
        return engine

    def close(self) -> None:
        """Closes all engines."""
        self._closers.close()


class WorldError(Exception):
    """Processes have failed, or have not answered."""


class Processes:
    """The processes of one world after another.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._connections: list[Connection] = []
        self._closers = ExitStack()

    def run(
        self, layout: EngineLayout, body: Callable[..., Answer], arguments: Sequence[Any], deadline_s: float
    ) -> list[Answer]:
        """Runs `body(harness, *arguments)` in every process; gives their results in the order of the processes.

        Args:
            layout: of the harness.
            body: a function of a module; collective.
            arguments: the same for all.
            deadline_s: for all of it.

        Raises:
            WorldError: some process has failed, with its traceback, or has not answered.
            Exception: that of the body, in a world of one process.
        """
        if self._size == 1:
            return [_run(layout, body, arguments)]
        if not self._connections:
            self._start()
        message = pickle.dumps((layout, body, arguments))
        for connection in self._connections:
            connection.send_bytes(message)
        return self._answers(time.monotonic() + deadline_s)

    def close(self) -> None:
        """Ends the processes."""
        self._connections.clear()
        self._closers.close()

    def _start(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTED_ONCE))
        folder = self._closers.enter_context(tempfile.TemporaryDirectory(prefix="rollmesh-world-"))
        for number in range(self._size):
            ours, theirs = context.Pipe()
            environment = dict(environment_of(number, self._size, Path(folder) / "meeting"))
            process = context.Process(target=_serve, args=(theirs, environment), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._closers.callback(process.join)
            self._closers.callback(process.kill)
            self._closers.callback(ours.close)

    def _answers(self, deadline: float) -> list[Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        # Once one has failed the others may wait for it in vain.
        while len(answers) < len(self._connections) and all(succeeded for succeeded, _ in answers.values()):
            waiting = {c: number for number, c in enumerate(self._connections) if number not in answers}
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0.0))
            if not ready:
                answers |= dict.fromkeys(waiting.values(), (False, "no answer within the deadline"))
            for connection in ready:
                answers[waiting[connection]] = _receive(connection)  # type: ignore[index,arg-type]  # of ours alone
        if failures := [f"process {number}: {said}" for number, (succeeded, said) in answers.items() if not succeeded]:
            self.close()
            raise WorldError("\n".join(failures))
        return [answers[number][1] for number in sorted(answers)]


class EngineWorld:
    """A layout in its processes.

    Args:
        layout: of engines.
        processes: as many as it says.
    """

    def __init__(self, layout: EngineLayout, processes: Processes) -> None:
        self.layout = layout
        self._processes = processes

    def run(self, body: Callable[..., Answer], *arguments: Any, deadline_s: float = _DEADLINE_S) -> list[Answer]:
        """See `Processes.run`."""
        return self._processes.run(self.layout, body, arguments, deadline_s)


def _receive(connection: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own child
    except EOFError:
        return False, "it has ended"
    return answer


def _serve(connection: Connection, environment: Mapping[str, str]) -> None:
    """Runs what is sent, until the connection ends."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    # An engine searches for garbage at its end: not in all of torch and transformers, each time.
    freeze_heap()
    # Keeps the process group from one call to the next: its meeting file is good for one.
    world = World("cpu", need_group=True)
    while True:
        try:
            layout, body, arguments = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own parent
        except EOFError:
            break
        try:
            answer = True, _run(layout, body, arguments)
        except Exception:  # noqa: BLE001 - whatever it is, it is the answer
            answer = False, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))
        # Nor in what this call has imported: its engine has just searched for garbage.
        gc.freeze()
    world.close()


def _run(layout: EngineLayout, body: Callable[..., Answer], arguments: Sequence[Any]) -> Answer:
    harness = Harness(layout)
    try:
        return body(harness, *arguments)
    finally:
        harness.close()
