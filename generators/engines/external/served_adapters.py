"""The adapters that an engine has at once: one per version that still has responses, and the newest.

Invariants: a job keeps the adapter under which it began, so all its tokens are of one version. An earlier adapter is
given up when its last job has ended, at the next swap. There are at most `most`: where a swap would make one more, all
jobs are interrupted before, and continue from their tokens under the newest.
"""

from __future__ import annotations

import itertools
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rollmesh.generators.engines.adapters import AdapterWeights
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.runtime.scratch_folder import scratch_folder

MOST_ADAPTERS = 4
"""Versions alive in an engine: a response outlives so many swaps under its own."""


@dataclass(slots=True, eq=False)
class LiveAdapter:
    """An adapter in the engine.

    Attributes:
        label: of its version.
        number: unique in this engine, from 1 on.
        folder: with its files.
        jobs: that compute with it.
    """

    label: str
    number: int
    folder: Path
    jobs: int = 0


class ServedAdapters:
    """The adapters of one engine and their files. Files are written in any thread; the rest is of one event loop.

    Args:
        most: that live at once.

    Attributes:
        base_digest: of the base in the engine; empty where it has none.
        newest: the adapter of new jobs; None before the first.
    """

    def __init__(self, most: int = MOST_ADAPTERS) -> None:
        self._most = most
        self._live: list[LiveAdapter] = []
        self._numbers = itertools.count(1)
        self._resources = ExitStack()
        self._root: Path | None = None
        self.base_digest = ""
        self.newest: LiveAdapter | None = None

    @property
    def is_full(self) -> bool:
        """True where every adapter has jobs, and there is no place for another."""
        return len(self._live) >= self._most and all(adapter.jobs for adapter in self._live)

    def write(self, adapter: AdapterWeights) -> Path:
        """Writes an adapter's files.

        Raises:
            WeightsError: the disk does not take them.
        """
        # Imported late: torch takes a second.
        from rollmesh.mesh.weights.peft_folder import rank_of, write_peft_folder

        try:
            if self._root is None:
                self._root = self._resources.enter_context(scratch_folder("rollmesh-adapters-"))
            folder = self._root / str(next(self._numbers))
            folder.mkdir()
            alpha = adapter.scale * rank_of(adapter.factors)
            write_peft_folder(folder, adapter.factors, alpha=alpha, rslora=False, base="")
        except OSError as error:
            raise WeightsError(
                f"an adapter cannot be written for the engine: {error}", hint="set TMPDIR to a folder with room"
            ) from error
        return folder

    def add(self, label: str, folder: Path) -> LiveAdapter:
        """Makes an adapter the newest, once the engine has it."""
        self.newest = LiveAdapter(label, self.number_of(folder), folder)
        self._live.append(self.newest)
        return self.newest

    @staticmethod
    def number_of(folder: Path) -> int:
        """The number of an adapter that was written there."""
        return int(folder.name)

    def begin_job(self) -> LiveAdapter | None:
        """The adapter of a job that begins; None before the first."""
        if self.newest is not None:
            self.newest.jobs += 1
        return self.newest

    def end_job(self, adapter: LiveAdapter | None) -> None:
        """Records the end of a job."""
        if adapter is not None:
            adapter.jobs -= 1

    def take_idle(self, *, newest: bool = False) -> list[LiveAdapter]:
        """The adapters without jobs, which the caller takes out of the engine; the newest only where asked for."""
        idle = [adapter for adapter in self._live if not adapter.jobs and (newest or adapter is not self.newest)]
        self._live = [adapter for adapter in self._live if adapter not in idle]
        for adapter in idle:
            self.discard(adapter.folder)
        return idle

    @staticmethod
    def discard(folder: Path) -> None:
        """Removes an adapter's files."""
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Removes all files."""
        self._resources.close()
