"""The child processes of vLLM: their ids, their end, and the memory that they shared.

Often vLLM's workers miss the request to end, and are killed by vLLM itself after seconds. The files of their shared
memory are left then, until this process ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

from rollmesh.mesh.liveness.freeze_detector import ProcessState
from rollmesh.mesh.liveness.process_ends import survivors
from rollmesh.mesh.liveness.process_state import read_process_trees

_PYTHONS = "/dev/shm/psm_"  # noqa: S108 # what Python's shared memory is called
# Between the workers of a CPU; stays where they are killed.
_WORKERS = "/dev/shm/vllm_dist_"  # noqa: S108 # where the kernel has it


class ProcessTree:
    """Processes that one engine has started.

    Args:
        roots: process ids of its engine cores; the processes that these have started belong to the tree.
    """

    def __init__(self, roots: list[int]) -> None:
        self._members: list[psutil.Process] = []
        self._roots = set(roots)
        self._shared: set[str] = set()
        for root in roots:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(root)
                self._members += [process, *process.children(recursive=True)]
        self._find_shared_memory()

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that are alive."""
        return [member.pid for member in _alive(self._members)]

    def process_state(self) -> ProcessState | None:
        """Reads their state, and that of processes that they have started since."""
        return read_process_trees(self._roots)

    def end_workers(self, grace_s: float) -> None:
        """Ends all but the engine cores, which are ending and wait for them."""
        workers = [member for member in self._members if member.pid not in self._roots]
        _kill(_alive(workers, grace_s))

    def kill(self) -> None:
        """Kills the remaining processes, waits for their end (a second at most), and removes their shared memory."""
        alive = _alive(self._members)
        _kill(alive)
        _alive(alive, 1.0)
        for name in self._shared:
            file = Path(name)
            if file.exists():
                file.unlink(missing_ok=True)
                if name.startswith(_PYTHONS):
                    # They registered it with the tracker of this process.
                    resource_tracker.unregister(f"/{file.name}", "shared_memory")
        self._shared.clear()
        # No zombies either.
        for child in multiprocessing.active_children():
            if child.pid in self._roots:
                child.join(1.0)

    def _find_shared_memory(self) -> None:
        for member in self._members:
            with contextlib.suppress(psutil.Error):
                areas = {area.path for area in member.memory_maps()}
                self._shared |= {path for path in areas if path.startswith((_PYTHONS, _WORKERS))}


def _alive(members: list[psutil.Process], within_s: float = 0.0) -> list[psutil.Process]:
    """The members that have not ended within `within_s`; an id that another process has by now is not theirs."""
    running = [member for member in members if member.is_running()]
    alive = survivors([member.pid for member in running], within_s)
    return [member for member in running if member.pid in alive]


def _kill(members: list[psutil.Process]) -> None:
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
