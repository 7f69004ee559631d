"""A run's folder with checkpoints of a few bytes, and their copies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import xxhash

from rollmesh.learner.checkpoint.copy_thread import CopyThread
from rollmesh.learner.checkpoint.remote_copies import RemoteCopies

FILES = {"state.json": b"{}", "__0_0.distcp": b"weights", "critic/state.json": b"{}"}


class SavedRun:
    """A run.

    Args:
        folder: its own.
        url: under which copies are made.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.checkpoints, self.log = folder / "checkpoints", folder / "consumption.jsonl"
        self.copies = RemoteCopies(url)

    def save(self, name: str, *, weights: bytes = b"weights") -> Path:
        """Writes a checkpoint, and the consumption log up to it."""
        folder, digests = self.checkpoints / name, {}
        for file, content in {**FILES, "__0_0.distcp": weights}.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(name.encode() + content)
            digests[file] = xxhash.xxh3_128(name.encode() + content).hexdigest()
        (folder / "digests.json").write_text(json.dumps(digests))
        self.log.write_text(f"up to {name}\n")
        return folder

    def remove(self, name: str) -> None:
        """Removes a checkpoint, as retention does."""
        shutil.rmtree(self.checkpoints / name)

    def update(self) -> list[str]:
        """Brings the copies up to date; names of the new ones."""
        added = []
        while name := self.copies.copy_next(self.checkpoints, self.log):
            added.append(name)
        return added

    def thread(self) -> CopyThread:
        """A thread that does the same."""
        return CopyThread(self.copies, self.checkpoints, self.log)

    def names(self) -> list[str]:
        """Complete copies."""
        return sorted(self.copies._complete())
