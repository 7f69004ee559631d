"""Adapters as files, for an engine that loads them from a folder."""

from __future__ import annotations

import itertools
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rollmesh.generators.engines.adapters import AdapterWeights
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.runtime.scratch_folder import scratch_folder


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder with one adapter, as peft writes it."""

    path: Path

    def discard(self) -> None:
        """Removes it."""
        shutil.rmtree(self.path, ignore_errors=True)


class AdapterFolders:
    """The folders of one engine's adapters."""

    def __init__(self) -> None:
        self._resources = ExitStack()
        self._numbers = itertools.count(1)
        self._root: Path | None = None

    def write(self, adapter: AdapterWeights) -> AdapterFolder:
        """Writes an adapter's files; in any thread.

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
        return AdapterFolder(folder)

    def close(self) -> None:
        """Removes all files."""
        self._resources.close()
