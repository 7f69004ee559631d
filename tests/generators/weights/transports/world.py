"""A learner to receive weights from, in this process or in one that can be stopped and killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rollmesh.generators.weights.learner_connection import LearnerConnection
from rollmesh.generators.weights.transports import Received, Transfer, Transport
from rollmesh.learner.weights import PublishRules, WeightPublisher, WeightsService
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import BucketSet
from rollmesh.protos import weights_pb2, weights_pb2_grpc
from tests.generators.forked import ForkedProgram, fork

SECURITY = SecuritySection()
RUN = "run"
# Bytes of the small versions that most tests send; several to a version.
BUCKET_BYTES = 40_000


@dataclass(frozen=True)
class Case:
    """One transport under contract.

    Attributes:
        name: of the transport.
        receiver: makes a receiver's side, given the same folder; of several receivers each has its own.
        publisher: makes the learner's side, given a folder that stands in for /dev/shm.
        needs_publisher: bytes stop coming when the publisher stops (not so where they lie in a file).
        at_once: receivers that can receive at the same time.
    """

    name: str
    receiver: Callable[[Path], Transport]
    publisher: Callable[[Path, int], WeightPublisher]
    needs_publisher: bool = True
    at_once: int = 3


def default_publisher(folder: Path, bucket_bytes: int) -> WeightPublisher:
    """A publisher whose bytes lie in a file in `folder`."""
    return WeightPublisher(RUN, {"config.json": b"{}"}, PublishRules(bucket_bytes=bucket_bytes), directory=folder)


def tensors(seed: int, rows: int = 40) -> dict[str, torch.Tensor]:
    """Eight tensors of `rows` x 64 float32 each: 80 KB at the default."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}.weight": torch.randn(rows, 64, generator=generator) for i in range(8)}


class Learner:
    """A learner as a receiver sees it."""

    def __init__(self, case: Case, address: str, folder: Path) -> None:
        self._case = case
        self._folder = folder
        self._receivers: list[Transport] = []
        self._fetches = 0
        self._connection = LearnerConnection("learner-1", address, partial(open_channel, address, SECURITY))

    def receiver(self) -> Transport:
        """A new receiver's side of the transport; closed with the learner."""
        made = self._case.receiver(self._folder)
        self._receivers.append(made)
        return made

    def fetch(self, bucket_set: BucketSet, timeout_s: float = 10.0, member_id: str = "") -> Transfer:
        """A transfer from this learner; to a receiver of its own where `member_id` is empty."""
        self._fetches += 1
        return Transfer(
            bucket_set,
            self._connection,
            timeout_s,
            superseded=lambda: False,
            member_id=member_id or f"receiver-{self._fetches}",
        )

    async def close(self) -> None:
        for made in self._receivers:
            await made.close()
        await self._connection.close()


class LocalLearner(Learner):
    """A learner in this process.

    Attributes:
        publisher: holds the versions.
    """

    def __init__(self, case: Case, address: str, folder: Path, publisher: WeightPublisher) -> None:
        super().__init__(case, address, folder)
        self.publisher = publisher

    def publish(self, version: int, rows: int = 40) -> weights_pb2.Manifest:
        """Publishes `tensors(version, rows)`."""
        return self.publisher.publish(PolicyVersion(1, version), tensors(version, rows).items(), "float32")

    def damage(self, manifest: weights_pb2.Manifest, name: str) -> None:
        """Flips a bit in the last bucket, where this transport reads it."""
        offer = next((o for o in manifest.offers if o.transport == name), None)
        path = self._folder / (offer or manifest.offers[0]).address
        if path.is_dir():
            path = max(path.glob("*.safetensors"))
        elif not path.is_file():
            # The transport reads the publisher's own bytes.
            path = Path(manifest.offers[0].address)
        with path.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))


class RemoteLearner(Learner):
    """A learner in a process of its own, with one version of 32 MB in 16 buckets.

    Attributes:
        manifest: of that version.
        port: on which it serves.
    """

    def __init__(self, case: Case, address: str, folder: Path, process: ForkedProgram, manifest: bytes) -> None:
        super().__init__(case, address, folder)
        self._process = process
        self.manifest = weights_pb2.Manifest.FromString(manifest)
        self.port = int(address.rpartition(":")[2])

    def freeze(self) -> None:
        """It hangs, its connections stay open."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def local_learner(case: Case, folder: Path) -> AsyncIterator[LocalLearner]:
    publisher = case.publisher(folder, BUCKET_BYTES)
    server = new_server(SECURITY)
    weights_pb2_grpc.add_WeightsServicer_to_server(WeightsService(publisher), server)
    port = bind(server, "127.0.0.1", 0, SECURITY)
    await server.start()
    async with AsyncExitStack() as stack:
        stack.callback(publisher.close)
        stack.push_async_callback(server.stop, 0)
        learner = LocalLearner(case, f"127.0.0.1:{port}", folder, publisher)
        stack.push_async_callback(learner.close)
        yield learner


@asynccontextmanager
async def remote_learner(case: Case, folder: Path) -> AsyncIterator[RemoteLearner]:
    process = await asyncio.to_thread(fork, "tests.generators.weights.transports.world", case.name, str(folder))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(process.end)
        ready = json.loads(await process.readline())
        learner = RemoteLearner(case, f"127.0.0.1:{ready['port']}", folder, process, bytes.fromhex(ready["manifest"]))
        stack.push_async_callback(learner.close)
        yield learner


class Arrivals:
    """The `arrived` of a transfer; keeps a copy of every bucket as it was when it was announced."""

    def __init__(self, bucket_set: BucketSet) -> None:
        self._bucket_set = bucket_set
        self._first: list[Callable[[], object]] = []
        self.copies: dict[int, bytes] = {}
        self.some = asyncio.Event()

    def at_first(self, action: Callable[[], object]) -> None:
        """Does something when the first bucket is there."""
        self._first.append(action)

    def __call__(self, data: memoryview, index: int) -> None:
        assert index not in self.copies, f"bucket {index} arrived twice"
        self.copies[index] = bytes(self._bucket_set.part(data, index))
        self.some.set()
        while self._first:
            self._first.pop()()

    def check(self, received: Received) -> None:
        """All came, each was whole when it was announced, and is so in what was returned."""
        assert sorted(self.copies) == list(range(len(self._bucket_set.buckets)))
        for index, copy in self.copies.items():
            self._bucket_set.verify(index, copy)
            assert self._bucket_set.part(received.data, index) == copy


async def _serve(case: Case, folder: Path) -> None:
    publisher = case.publisher(folder, 2 << 20)
    server = new_server(SECURITY)
    weights_pb2_grpc.add_WeightsServicer_to_server(WeightsService(publisher), server)
    port = bind(server, "127.0.0.1", 0, SECURITY)
    await server.start()
    policy = PolicyVersion(1, 0)
    manifest = publisher.publish(policy, {f"{i}": torch.full((1 << 19,), i) for i in range(8)}.items(), "float32")
    print(json.dumps({"port": port, "manifest": manifest.SerializeToString().hex()}), flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    from tests.generators.weights.transports.cases import CASES, NCCL

    asyncio.run(_serve(next(c for c in (*CASES, NCCL) if c.name == sys.argv[1]), Path(sys.argv[2])))
