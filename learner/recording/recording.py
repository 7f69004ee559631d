"""The recorded stage: every batch that a learner claims, with its payloads, in files that can be trained on again.

A file is `MAGIC`, then frames: a header (incarnation, version, length and checksum of the rest) and a zstd frame
with a `RecordedBatch`. A learner writes files of its own, `INCARNATION-NUMBER.batches`, a new one at a fixed size.

Invariants: the training thread never waits for the disk, and a claim only where `_PENDING` batches wait for it already.
A torn frame ends its file for the reader (a learner that was killed leaves one at most), a damaged one is an error. The
files stay below their bound, the oldest go first. A disk that refuses ends the recording, not the training.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

import xxhash
import zstandard

from rollmesh.learner.rollouts.group import SampledGroup, decode_group
from rollmesh.mesh.errors import DataError, RollmeshError
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks, log_errors
from rollmesh.mesh.tables import TRAIN
from rollmesh.mesh.trajectory import payload_codec
from rollmesh.mesh.trajectory.lineage import Lineage
from rollmesh.protos import buffer_pb2, recording_pb2

log = logging.getLogger(__name__)
FOLDER = "recording"
MAGIC = b"RMBATCH1"
# Incarnation, version, bytes and xxh3 of the compressed batch.
_HEADER = struct.Struct("<IQIQ")
_LEVEL = 1
# Files per bound: one is deleted when it is reached.
_FILES = 8
# Batches that wait for the disk before the next claim waits with them.
_PENDING = 4


class PayloadFetcher(Protocol):
    """Gives payloads that did not come along with the leases."""

    def fetch(self, table: str, refs: Sequence[buffer_pb2.MemberRef]) -> AsyncIterator[bytes]:
        """Payloads in the order of `refs`."""
        ...


class BatchRecorder:
    """Writes the batches of one learner. All methods but the thread's own belong to the event loop.

    Args:
        folder: of the recording.
        client: gives payloads that the other ranks fetch for themselves.
        lineage: of this learner.
        max_bytes: of all files together.
        planned_end: of the run: the end of its schedules.
    """

    def __init__(
        self, folder: Path, client: PayloadFetcher, lineage: Lineage, *, max_bytes: int, planned_end: int = 0
    ) -> None:
        self._client = client
        self._lineage = lineage
        self._planned_end = planned_end
        self._files = _Files(folder, lineage.resumed[-1][0], max_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recording")
        self._room = asyncio.Semaphore(_PENDING)
        self._tasks = BackgroundTasks(log_errors(log))

    async def record(self, version: int, groups: Sequence[SampledGroup], dropped: Mapping[str, int]) -> None:
        """Accepts a batch that has just been claimed; it is written concurrently with the training."""
        await self._room.acquire()
        writing = self._fetch_and_write(version, list(groups), dict(dropped))
        task = self._tasks.spawn(writing, f"recording the batch of version {version}")
        task.add_done_callback(lambda _task: self._room.release())

    async def _fetch_and_write(self, version: int, groups: Sequence[SampledGroup], dropped: Mapping[str, int]) -> None:
        try:
            absent = [
                buffer_pb2.MemberRef(group_id=group.group_id, member=member.meta.member)
                for group in groups
                for member in group.scored_members
                if member.trajectory is None
            ]
            names = [(ref.group_id, ref.member) for ref in absent]
            payloads = [data async for data in self._client.fetch(TRAIN, absent)] if absent else []
            fetched = dict(zip(names, payloads, strict=True))
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._write, version, groups, dropped, fetched)
        except RollmeshError as error:
            log.warning("batch of version %d is not recorded: %s", version, error)

    def _write(
        self,
        version: int,
        groups: Sequence[SampledGroup],
        dropped: Mapping[str, int],
        fetched: Mapping[tuple[str, int], bytes],
    ) -> None:
        batch = recording_pb2.RecordedBatch(
            incarnation=self._lineage.resumed[-1][0],
            version=version,
            groups=[_without_payloads(group) for group in groups],
            payloads=[payload for group in groups for payload in _payloads(group, fetched)],
            dropped=dropped,
            takeovers=[buffer_pb2.Takeover(incarnation=i, resumed_at=v) for i, v in self._lineage.resumed],
            planned_end=self._planned_end,
        )
        self._files.append(batch)

    async def close(self) -> None:
        """Writes all pending batches."""
        await self._tasks.drain()
        await asyncio.to_thread(self._thread.shutdown)
        self._files.close()


def _payloads(group: SampledGroup, fetched: Mapping[tuple[str, int], bytes]) -> Iterator[bytes]:
    """Payloads of the trained members, by position in `leased.members`."""
    found = {
        member.meta.member: payload_codec.encode(member.trajectory)
        for member in group.members
        if member.trajectory is not None
    }
    for meta in group.leased.members:
        yield found.get(meta.member) or fetched.get((group.group_id, meta.member), b"")


def _without_payloads(group: SampledGroup) -> buffer_pb2.LeasedGroup:
    """The group as the buffer sent it, apart from how its payloads came."""
    whole = buffer_pb2.LeasedGroup()
    whole.CopyFrom(group.leased)
    whole.ClearField("payload_bytes")
    whole.ClearField("pieces")
    return whole


def decode_groups(batch: recording_pb2.RecordedBatch) -> list[SampledGroup]:
    """The groups of a recorded batch, decoded.

    Raises:
        PayloadError: a payload is malformed or missing.
    """
    payloads = iter(batch.payloads)
    return [decode_group(group, list(islice(payloads, len(group.members)))) for group in batch.groups]


class _Files:
    """The files of one incarnation, and the bound over all."""

    def __init__(self, folder: Path, incarnation: int, max_bytes: int) -> None:
        self._folder = folder
        self._incarnation = incarnation
        self._max_bytes = max_bytes
        self._number = 0
        self._file: BinaryIO | None = None
        self._refused = False

    def append(self, batch: recording_pb2.RecordedBatch) -> None:
        """Appends a frame; a full disk is reported once, and ends the recording."""
        if self._refused:
            return
        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(batch.SerializeToString())
        header = _HEADER.pack(batch.incarnation, batch.version, len(packed), xxhash.xxh3_64_intdigest(packed))
        try:
            file = self._open(len(header) + len(packed))
            file.write(header + packed)
            file.flush()
        except OSError as error:
            self._refused = True
            log.warning("recording ends before version %d: %s: %s", batch.version, self._folder, error.strerror)

    def _open(self, coming: int) -> BinaryIO:
        """The file for the next frame, after making room for it."""
        if self._file is not None and self._file.tell() + coming > self._max_bytes // _FILES:
            self.close()
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            while (path := self._folder / f"{self._incarnation:06d}-{self._number:06d}.batches").exists():
                self._number += 1
            self._file = path.open("xb")
            self._file.write(MAGIC)
        *older, _ = files = sorted(self._folder.glob("*.batches"))
        total = sum(path.stat().st_size for path in files) + coming
        while total > self._max_bytes and older:
            oldest = older.pop(0)
            total -= oldest.stat().st_size
            oldest.unlink()
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class _BatchLocation:
    """The location of a batch: the bytes of its zstd frame in a file."""

    path: Path
    start: int
    length: int
    checksum: int


class Recording:
    """The batches that count: those of each incarnation below the version at which its successor continued.

    Args:
        folder: of the recording.

    Attributes:
        lineage: of the last learner that recorded.

    Raises:
        DataError: there is no batch in the folder.
    """

    def __init__(self, folder: Path) -> None:
        locations: dict[tuple[int, int], _BatchLocation] = {}
        for path in sorted(folder.glob("*.batches")):
            locations |= dict(_frames(path))
        if not locations:
            raise DataError(f"no batch is recorded in {folder}", hint="train with logging.record: true")
        last = _read(locations[max(locations)])
        self.lineage = Lineage(tuple((t.incarnation, t.resumed_at) for t in last.takeovers))
        self._locations: dict[int, _BatchLocation] = {}
        for (incarnation, version), location in sorted(locations.items()):
            later = [resumed for i, resumed in self.lineage.resumed if i > incarnation]
            if version < min(later, default=version + 1):
                self._locations[version] = location

    @property
    def versions(self) -> Sequence[int]:
        """Versions that have their batch, ascending."""
        return sorted(self._locations)

    def batch(self, version: int) -> recording_pb2.RecordedBatch | None:
        """The batch that trained a version; None where it is not recorded."""
        location = self._locations.get(version)
        return None if location is None else _read(location)


def _frames(path: Path) -> Iterator[tuple[tuple[int, int], _BatchLocation]]:
    """((incarnation, version), place) of the whole frames of a file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            incarnation, version, length, checksum = _HEADER.unpack(header)
            start = file.tell()
            if start + length > size:
                log.info("%s ends in the batch of version %d: left out", path, version)
                return
            yield (incarnation, version), _BatchLocation(path, start, length, checksum)
            file.seek(start + length)


def _read(location: _BatchLocation) -> recording_pb2.RecordedBatch:
    with location.path.open("rb") as file:
        file.seek(location.start)
        packed = file.read(location.length)
    if xxhash.xxh3_64_intdigest(packed) != location.checksum:
        raise DataError(
            f"{location.path} is damaged at byte {location.start}", hint="replay only up to the version before"
        )
    return recording_pb2.RecordedBatch.FromString(zstandard.ZstdDecompressor().decompress(packed))
