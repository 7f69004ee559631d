"""Every rank's part of a publication: copied in the thread that trains, digested while the next batch is trained.

Ranks that can open rank 0's file (those of its host) write into it. Where all are on one host, each writes its own
shards, and nothing travels. Else the engine brings full tensors to the ranks of that host, a part to each: no bytes
pass through rank 0 alone. Between two versions a thread of each rank takes turns with those of the others, over a
channel of their own. Rank 0 makes the next version's file, and all map the pages that they will write. Later all send
their digests. So the thread that trains finds memory that is ready, and leaves as soon as the weights are copied.

Where devices are shared, the next file is made only when it is needed: until then its memory is others'.

Invariants: all ranks export in the same order. The next file is made when the last version has been announced. A rank
that leaves amid a publication is named by the watch of the others (`learner.liveness.rank_watch`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

import msgpack

from rollmesh.learner.distributed.rank_channel import RankChannel
from rollmesh.learner.engines.interface import Engine, WeightPart
from rollmesh.learner.weights.version_layout import PartDigests, VersionLayout
from rollmesh.learner.weights.version_part import copy_part, copy_shards, digest_part
from rollmesh.learner.weights.version_storage import VersionFile, open_version, touch_pages
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights.adapter import FROZEN_BASE
from rollmesh.protos import weights_pb2

PUBLICATION_S = 1800.0
"""Longest time of a publication, and of the preparation of the next; a slow `weights.dir` counts."""
_PROBE_BYTES = 16


class VersionSink(Protocol):
    """The destination of written versions: `learner.weights.WeightPublisher`."""

    def allocate(self, nbytes: int) -> VersionFile:
        """Memory for a version."""
        ...

    def complete(
        self, policy: PolicyVersion, layout: VersionLayout, file: VersionFile, parts: Mapping[int, PartDigests]
    ) -> weights_pb2.Manifest:
        """Makes a version fetchable."""
        ...


class WeightExport:
    """One rank's part of publications; making it is collective.

    Args:
        engine: of the policy.
        channel: to the other ranks, for this alone; None for a single rank.
        bucket_bytes: `weights.bucket_bytes`.
        ahead: the next version's file is made while the next batch trains; the same on every rank.
        part: tensors of a version. With `adapter` the base is published once, before (`export_base`).

    Attributes:
        layout: of every version.
    """

    def __init__(
        self,
        engine: Engine,
        channel: RankChannel | None,
        bucket_bytes: int,
        *,
        ahead: bool = True,
        part: WeightPart = "policy",
    ) -> None:
        self._engine = engine
        self._ahead = ahead
        self._bucket_bytes = bucket_bytes
        self._weights: WeightPart = part
        self._process = engine.layout.process
        self._channel = channel
        self._holders = _processes_of_this_host(engine)
        self.layout = VersionLayout(engine.exported_tensors(holders=self._holders, part=part), bucket_bytes)
        self._part = self.layout.part(self._process)
        # Ranges of bytes that this rank writes; known from the first version on.
        self._written: list[tuple[int, int]] = []
        self._background = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._file: VersionFile | None = None
        self._prepared: Future[memoryview] | None = None
        self._base: Future[weights_pb2.Manifest | None] | None = None

    def export(self, sink: VersionSink | None, policy: PolicyVersion) -> Future[weights_pb2.Manifest | None]:
        """Copies the weights as they are now, and has them published; collective, in the thread that trains.

        Args:
            sink: on rank 0.
            policy: the version.

        Returns:
            Done when the version can be fetched, on rank 0 with its manifest. It fails with WeightsError.

        Raises:
            WeightsError: there is no memory for a version, or its base did not become fetchable.
        """
        if self._base is not None and not wait([self._base], PUBLICATION_S).done:
            raise WeightsError(
                f"the base of the adapter was not published within {PUBLICATION_S:.0f} s",
                hint="look whether another rank hangs, or weights.dir is slow",
            )
        if self._prepared is None:
            self._prepared = self._background.submit(self._prepare, sink)
        if not wait([self._prepared], PUBLICATION_S).done:
            raise WeightsError(
                f"memory for version {policy} was not ready within {PUBLICATION_S:.0f} s",
                hint="look whether the machine is out of memory and swaps",
            )
        target = self._prepared.result()
        if len(self._holders) == self._engine.layout.processes:
            self._written = copy_shards(self.layout, self._engine.exported_shards(part=self._weights), target)
        else:
            exported = self._engine.export_weights(holders=self._holders, part=self._weights)
            copy_part(self._part, exported, target)
            self._written = [(tensor.place.start, tensor.place.start + tensor.nbytes) for tensor in self._part]
        published = self._background.submit(self._publish, sink, policy, target)
        self._prepared = self._background.submit(self._prepare, sink) if self._ahead else None
        return published

    @property
    def base_bytes(self) -> int:
        """Bytes of the base to which versions belong; 0 where they are whole."""
        if self._weights != "adapter":
            return 0
        return VersionLayout(self._engine.exported_tensors(part="base"), self._bucket_bytes).nbytes

    def export_base(self, sink: VersionSink | None) -> Future[weights_pb2.Manifest | None]:
        """Copies the base to which versions belong, and has it published; collective, before the first of them.

        Args:
            sink: on rank 0.

        Returns:
            Done when it can be fetched; the first `export` waits for it.

        Raises:
            WeightsError: there is no memory for it.
        """
        assert self._weights == "adapter", "other versions are whole"
        base = WeightExport(self._engine, self._channel, self._bucket_bytes, ahead=False, part="base")
        self._base = published = base.export(sink, FROZEN_BASE)
        published.add_done_callback(lambda _: base._background.shutdown(wait=False))
        return published

    def close(self) -> None:
        """Ends the thread, after the last publication; all ranks together, before they leave their process group."""
        self._background.shutdown()
        self._prepared = None
        if self._file is not None:
            self._file.close()

    # ----------------------------------------------------------------------------------------------- background

    def _prepare(self, sink: VersionSink | None) -> memoryview:
        """The bytes of the next version, with this rank's pages mapped."""
        if sink is not None:
            try:
                self._file = sink.allocate(self.layout.nbytes)
            except WeightsError:
                self._send_address("")
                raise
            data = self._file.view()
            self._send_address(self._file.address)
        else:
            data = self._receive_file()
        for start, end in self._written:
            touch_pages(data[start:end])
        return data

    def _send_address(self, address: str) -> None:
        if self._channel is not None:
            self._channel.send(address.encode())

    def _receive_file(self) -> memoryview:
        """Rank 0's file; nothing on another host."""
        assert self._channel is not None, "rank 0 has a sink"
        address = self._channel.receive().decode()
        if not address:
            raise WeightsError("rank 0 has no memory for a version of the weights", hint="see the error of rank 0")
        try:
            return open_version(address) if self._process in self._holders else memoryview(b"")
        except OSError as error:
            raise WeightsError(
                f"rank 0's file cannot be opened: {error}",
                hint="start the ranks of a machine as one user, with one namespace of process ids (containers: --pid)",
            ) from error

    def _publish(
        self, sink: VersionSink | None, policy: PolicyVersion, data: memoryview
    ) -> weights_pb2.Manifest | None:
        if self._channel is not None:
            # All have copied.
            self._channel.gather(b"copied")
        parts = {self._process: digest_part(self._part, data)}
        if self._channel is not None:
            own = parts[self._process]
            messages = self._channel.gather(msgpack.packb([list(own.tensors), list(own.buckets)]))
            parts = {rank: PartDigests(*msgpack.unpackb(message)) for rank, message in enumerate(messages)}
        if sink is None:
            return None
        assert self._file is not None, "it was prepared"
        file, self._file = self._file, None
        return sink.complete(policy, self.layout, file, parts)


def _processes_of_this_host(engine: Engine) -> Sequence[int]:
    """The processes that can open files of the leader's: it makes one, and all try to read it; collective."""
    if engine.layout.processes == 1:
        return (0,)
    leads = engine.layout.leads
    descriptor = os.memfd_create("rollmesh-probe") if leads else -1
    try:
        secret = secrets.token_bytes(_PROBE_BYTES)
        if leads:
            os.write(descriptor, secret)
        offered = engine.world.gather_bytes(f"/proc/{os.getpid()}/fd/{descriptor}".encode() + secret if leads else b"")[
            0
        ]
        path, secret = offered[:-_PROBE_BYTES], offered[-_PROBE_BYTES:]
        answers = engine.world.gather_bytes(b"yes" if _content(path) == secret else b"")
    finally:
        if leads:
            os.close(descriptor)
    return [process for process, answer in enumerate(answers) if answer or process == 0]


def _content(path: bytes) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, _PROBE_BYTES, 0)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
