"""Both ends of a push, as real as they are in a mesh: the learner's publisher and service, and a receiving process.

    python -m benchmarks.weights.push_ends ADDRESS ENCODING    (started by the benchmarks)

The receiver's engine copies the weights into tensors of its own, which is what every engine does at least.
"""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.types import SwapTimings
from rollmesh.generators.weights import WeightReceiver
from rollmesh.generators.weights.learner_connection import LearnerDirectory
from rollmesh.generators.weights.receiver import ReceiverSettings
from rollmesh.learner.weights import PublishRules, WeightPublisher, WeightsService
from rollmesh.learner.weights.published_version import PublishedVersion
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.weights import EncodingName
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.runtime.memory_tuning import TENSOR_BYTES, keep_freed_memory
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights.adapter import FROZEN_BASE
from rollmesh.protos import membership_pb2, weights_pb2, weights_pb2_grpc

RUN = "benchmark"
_OPEN = SecuritySection(allow_insecure=True)
_PUSH_S = 120.0
_GENERATOR = "generator"


@dataclass(frozen=True, slots=True)
class Push:
    """One version's way into service.

    Attributes:
        publish_s: for which training stood still.
        received_s: from the announcement to the last verified byte.
        service_s: from the announcement to service.
        report: of the receiver.
    """

    publish_s: float
    received_s: float
    service_s: float
    report: weights_pb2.SwapReport


class _Service(WeightsService):
    def __init__(self, publisher: WeightPublisher) -> None:
        super().__init__(publisher)
        self.reports: queue.SimpleQueue[weights_pb2.SwapReport] = queue.SimpleQueue()

    async def Report(self, request: weights_pb2.SwapReport, context: Any) -> weights_pb2.ReportResponse:
        response = await super().Report(request, context)
        self.reports.put(request)
        return response


class LearnerEnd:
    """A publisher with its service, and the receivers that were started for it."""

    def __init__(
        self, bridge: AsyncBridge, host: str, encoding: EncodingName, adapter_scale: float | None = None
    ) -> None:
        rules = PublishRules(transport="grpc", encoding=encoding, adapter_scale=adapter_scale)
        self.publisher = WeightPublisher(RUN, {}, rules)
        self._encoding = encoding
        self._bridge = bridge
        self._service = _Service(self.publisher)
        self.address = f"{host}:{bridge.call(self._start(host), 10)}"
        self._version = -1

    async def _start(self, host: str) -> int:
        self._server = new_server(_OPEN)
        weights_pb2_grpc.add_WeightsServicer_to_server(self._service, self._server)
        port = bind(self._server, host, 0, _OPEN)
        await self._server.start()
        return port

    @property
    def newest(self) -> PublishedVersion:
        """The version that was pushed last."""
        return self.publisher.version(PolicyVersion(1, self._version))

    @contextmanager
    def receiver(self, command: Callable[..., Sequence[str]]) -> Iterator[None]:
        """A receiver in a process of its own.

        Args:
            command: completes a command line to one that runs where it is to run.
        """
        arguments = [sys.executable, "-m", "benchmarks.weights.push_ends", self.address, self._encoding]
        process = subprocess.Popen(command(*arguments), stdin=subprocess.PIPE)
        try:
            yield
        finally:
            process.communicate(timeout=20)

    def publish_base(self, tensors: Iterable[tuple[str, torch.Tensor]], wire: torch.dtype) -> None:
        """Publishes the base to which all versions belong; receivers fetch it with the first of these."""
        self.publisher.publish(FROZEN_BASE, tensors, wire)

    def push(self, tensors: Iterable[tuple[str, torch.Tensor]], wire: torch.dtype) -> Push:
        """Publishes the next version and waits until the receiver has it in service."""
        self._version += 1
        began = time.perf_counter()
        self.publisher.publish(PolicyVersion(1, self._version), tensors, wire)
        publish_s = time.perf_counter() - began
        report = self._service.reports.get(timeout=_PUSH_S)
        if report.error or report.policy.version != self._version:
            raise RuntimeError(f"version {self._version} was not taken: {report}")
        return Push(publish_s, report.last_byte_us / 1e6, report.total_us / 1e6, report)

    def close(self) -> None:
        """Ends the service."""
        self._bridge.call(self._server.stop(0), 10)
        self.publisher.close()


class _Named:
    """Stands in for the membership: the learner is known and stays."""

    def __init__(self, address: str) -> None:
        self.learner = membership_pb2.Member(member_id="learner", address=address)
        self.policy, self.member_id = None, _GENERATOR

    def on_change(self, listener: Callable[[], None]) -> None:
        """Nothing changes."""

    async def heartbeat(self) -> None:
        """Nothing is new."""


class _Engine:
    def __init__(self) -> None:
        self._weights: dict[str, torch.Tensor] = {}

    def update_weights(
        self, version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]], digest: str
    ) -> Future[SwapTimings]:
        began = time.perf_counter()
        for name, tensor in tensors:
            if name not in self._weights:
                self._weights[name] = torch.empty_like(tensor)
            self._weights[name].copy_(tensor)
        took_us = (time.perf_counter() - began) * 1e6
        done: Future[SwapTimings] = Future()
        done.set_result(SwapTimings(version, digest, 0.0, 0.0, took_us, 0))
        return done


async def _receive(address: str, encoding: EncodingName) -> None:
    link = LearnerDirectory(cast(MembershipAgent, _Named(address)), SecuritySection())
    engine = cast(InferenceEngine, _Engine())
    settings = ReceiverSettings(member_id=_GENERATOR, run=RUN, host_id="far", transport="grpc", encoding=encoding)
    receiver = WeightReceiver(link, engine, settings)
    running = asyncio.create_task(receiver.run())
    # Until the benchmark closes this process' input.
    await asyncio.to_thread(sys.stdin.read)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await link.close()


if __name__ == "__main__":
    keep_freed_memory(TENSOR_BYTES)
    asyncio.run(_receive(sys.argv[1], cast(EncodingName, sys.argv[2])))
