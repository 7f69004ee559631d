"""Side data: large data of members (routed experts, images) as files next to Redis.

A file lies at `<folder>/<table>/<group>/<member>-<name>-<digest>`. Its contents are known from `MemberMeta.side` in
Redis alone, so a file counts only once a member has been written that names it.

Invariants
  * Names are checked before they become a path; no path leads out of the folder.
  * A file appears under its name whole, flushed and with the digest of its bytes in the name, or not at all.
  * The files of a group go when the group has ended; what no live group owns is swept by age.
  * Several fronts see one another's files only where their folders are one: a front reports a file that it lacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import xxhash

from rollmesh.buffer.protocol.side_data import check_name
from rollmesh.mesh.errors import DataError, PayloadError, StoreError
from rollmesh.protos import trajectory_pb2 as trajectory

_GROUP = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_PART = ".part"
# Says of groups, by id, whether they live.
Live = Callable[[Sequence[str]], Awaitable[Sequence[bool]]]
# Bytes read at once.
_READ_BYTES = 512 << 10


class SideFileStore:
    """The files of one front.

    Args:
        folder: shared by all fronts of the mesh; made when the first file comes.
        max_bytes: of one file.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def group_folder(self, table: str, group_id: str) -> Path:
        """The folder of a group's files.

        Raises:
            PayloadError: not a group id.
        """
        if not _GROUP.fullmatch(group_id):
            raise PayloadError("group_id", f"not a group id: {group_id[:80]!r}")
        return self.folder / table / group_id

    def _path(self, table: str, group_id: str, member: int, name: str, digest: str) -> Path:
        return self.group_folder(table, group_id) / f"{member}-{check_name(name)}-{digest}"

    async def receive(self, table: str, group_id: str, member: int, name: str, data: AsyncIterator[bytes]) -> int:
        """Stores a file; returns its bytes.

        Raises:
            PayloadError: empty, too large, or wrongly named.
            StoreError: the disk does not take it; nothing is left of it.
        """
        folder = self.group_folder(table, group_id)
        check_name(name)
        part = folder / f"{uuid.uuid4().hex}{_PART}"
        digest, size = xxhash.xxh3_64(), 0
        try:
            try:
                with await asyncio.to_thread(_create, part) as file:
                    async for piece in data:
                        size += len(piece)
                        if size > self.max_bytes:
                            raise PayloadError(
                                "data", f"more than {self.max_bytes} bytes", hint="buffer.side_max_bytes"
                            )
                        await asyncio.to_thread(_append, file, piece, digest)
                    if not size:
                        raise PayloadError("data", "is empty")
                    await asyncio.to_thread(_flush, file)
                await asyncio.to_thread(part.replace, self._path(table, group_id, member, name, digest.hexdigest()))
            finally:
                part.unlink(missing_ok=True)
        except FileNotFoundError as error:
            raise DataError(
                f"the folder of group {group_id} went away",
                hint="the group has ended: its side data is not needed any more",
            ) from error
        except OSError as error:
            raise StoreError(
                f"side data cannot be stored in {self.folder}: {error.strerror}",
                hint="free space there, or move buffer.side_dir",
            ) from error
        return size

    async def find_missing(self, table: str, group_id: str, member: int, side: Iterable[trajectory.SideData]) -> str:
        """The name of an entry without a file of its size here, or an empty text."""

        def missing() -> str:
            for entry in side:
                path = self._path(table, group_id, member, entry.name, entry.digest)
                if not path.is_file() or path.stat().st_size != entry.bytes:
                    return entry.name
            return ""

        return await asyncio.to_thread(missing)

    async def read(
        self, table: str, group_id: str, member: int, side: trajectory.SideData
    ) -> AsyncIterator[tuple[bytes, bool]]:
        """A file in pieces, each with whether it is the last.

        Raises:
            DataError: it is not here.
        """
        path = self._path(table, group_id, member, side.name, side.digest)
        left = side.bytes
        try:
            with await asyncio.to_thread(path.open, "rb") as file:
                while left:
                    piece = await asyncio.to_thread(file.read, min(left, _READ_BYTES))
                    left -= len(piece)
                    if not piece:
                        raise DataError(f"{path} is shorter than the {side.bytes} bytes it should have")
                    yield piece, not left
        except OSError as error:
            raise DataError(f"no side data {side.name} at {path}: {error.strerror}", hint=self.hint) from error

    @property
    def hint(self) -> str:
        """Advice for a missing file."""
        return f"every front of the mesh needs the same folder as buffer.side_dir; this one has {self.folder}"

    async def remove(self, table: str, group_ids: Iterable[str], live: Live) -> None:
        """Removes the files of those groups that have ended."""

        def existing() -> list[Path]:
            if not (self.folder / table).is_dir():
                return []
            folders = (self.folder / table / group_id for group_id in set(group_ids) if _GROUP.fullmatch(group_id))
            return [folder for folder in folders if folder.is_dir()]

        folders = await asyncio.to_thread(existing)
        if folders:
            await asyncio.to_thread(_remove_trees, await _ended(folders, live))

    async def sweep(self, table: str, live: Live, age_s: float) -> int:
        """Removes files that no live group owns and that have not changed for `age_s`, and unfinished files of that
        age.

        Args:
            table: the table of the files.
            live: tests which groups live.
            age_s: of what may be removed.

        Returns:
            Groups and unfinished files removed.
        """
        old = await asyncio.to_thread(_older_than, self.folder / table, time.time() - age_s)
        gone = await _ended([path for path in old if path.suffix != _PART], live)
        unfinished = [path for path in old if path.suffix == _PART]

        def remove() -> None:
            _remove_trees(gone)
            for path in unfinished:
                with contextlib.suppress(OSError):
                    path.unlink()

        await asyncio.to_thread(remove)
        return len(gone) + len(unfinished)


async def _ended(folders: Sequence[Path], live: Live) -> list[Path]:
    alive = await live([folder.name for folder in folders])
    return [folder for folder, lives in zip(folders, alive, strict=True) if not lives]


def _remove_trees(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _create(part: Path) -> BinaryIO:
    part.parent.mkdir(parents=True, exist_ok=True)
    return part.open("wb", buffering=0)


def _append(file: BinaryIO, piece: bytes, digest: xxhash.xxh3_64) -> None:
    digest.update(piece)
    view = memoryview(piece)
    while view:
        view = view[file.write(view) :]


def _flush(file: BinaryIO) -> None:
    os.fsync(file.fileno())


def _older_than(folder: Path, limit: float) -> list[Path]:
    """Group folders last changed before `limit`, and unfinished files of that age."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for group in folder.iterdir():
            candidates = [group, *group.glob(f"*{_PART}")]
            found += [path for path in candidates if path.stat().st_mtime < limit]
    return found
