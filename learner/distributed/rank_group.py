"""The ranks as one: rank 0 gives orders, the others follow them.

Rank 0 alone talks to the buffer about batches. It sends its decisions to the others as messages (msgpack over a gloo
broadcast), then every rank does the same with its `Worker`. With one rank nothing is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rollmesh.learner.batching.types import Packing
from rollmesh.learner.distributed.rank_payloads import Unusable
from rollmesh.learner.distributed.train_plan import TrainPlan
from rollmesh.learner.distributed.worker import TrainResult, UpdateRefused, Worker
from rollmesh.mesh.errors import StoreError, UnreachableError
from rollmesh.mesh.trajectory.versions import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor

TURN_S = 30.0
"""Longest wait of rank 0 before it asks the other ranks to keep waiting."""
# Rank 0 may read checkpoints, evaluate, or wait for a lost buffer between two messages.
_CHANNEL_TIMEOUT = timedelta(minutes=30)
_YES, _NO = b"yes", b"no"


class RankChannel:
    """A gloo group over all ranks for messages, whatever backend the engine uses; making it is collective."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_CHANNEL_TIMEOUT)

    def send(self, message: bytes) -> None:
        """On rank 0: sends bytes to all others."""
        dist.broadcast(torch.tensor([len(message)]), src=0, group=self._group)
        dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), src=0, group=self._group)

    def receive(self) -> bytes:
        """On the others: the next message."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._group)
        return data.numpy().tobytes()


class RankGroup:
    """Rank 0's view of all ranks.

    Args:
        worker: of rank 0.
        channel: to the other ranks; None where there are none.
    """

    def __init__(self, worker: Worker, channel: RankChannel | None) -> None:
        self._worker = worker
        self._channel = channel

    @property
    def alone(self) -> bool:
        """There is no other process."""
        return self._channel is None

    @property
    def dp_sizes(self) -> set[int]:
        """Numbers of data-parallel ranks of the models."""
        return self._worker.dp_sizes

    @property
    def packing(self) -> Packing:
        """The packing that all models of the run can take."""
        return self._worker.packing

    def sequence_cost(self, tokens: NDArray[np.int64], context: NDArray[np.int64]) -> NDArray[np.float64]:
        """Cost of tokens behind a context, over all models of the run."""
        return self._worker.sequence_cost(tokens, context)

    def prepare(self, plan: TrainPlan) -> Unusable:
        """Gives every rank its share; returns the groups that cannot be trained, and why."""
        if self._channel is not None:
            self._send_order("prepare", plan=plan.to_bytes())
        return self._worker.prepare(plan)

    def train(self, may_update: Callable[[], bool]) -> TrainResult | None:
        """Trains every rank on the share that it prepared.

        Args:
            may_update: asked once, when the first update is ready.

        Returns:
            None where `may_update` returned False; then nothing has changed.
        """
        self._send_order("train")

        def ask() -> None:
            allowed = may_update()
            if self._channel is not None:
                self._channel.send(_YES if allowed else _NO)
            if not allowed:
                raise UpdateRefused

        try:
            return self._worker.train(ask)
        except UpdateRefused:
            return None

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The weights; nothing happens before the first is asked for, and then the iterator has to be exhausted."""
        self._send_order("export")
        yield from self._worker.export()

    def begin_checkpoint(self, version: PolicyVersion, extra: dict[str, object]) -> Future[Path]:
        """Has a checkpoint written, each rank its part; their state is copied when this returns."""
        self._send_order("checkpoint", version=str(version), extra=extra)
        return self._worker.begin_checkpoint(version, extra)

    def load(self, folder: Path) -> dict[str, object]:
        """Restores a checkpoint on every rank."""
        self._send_order("load", folder=str(folder))
        return self._worker.load(folder)

    def keep_alive(self) -> None:
        """Keeps the others' wait for an order from timing out."""
        self._send_order("wait")

    def shutdown(self) -> None:
        """Ends the others' work."""
        self._send_order("end")

    def _send_order(self, order: str, **arguments: Any) -> None:
        if self._channel is not None:
            self._channel.send(msgpack.packb({"order": order, **arguments}))


def _train_if_allowed(worker: Worker, channel: RankChannel) -> None:
    def ask() -> None:
        if channel.receive() != _YES:
            raise UpdateRefused

    with contextlib.suppress(UpdateRefused):
        worker.train(ask)


def run_follower(worker: Worker, channel: RankChannel) -> None:
    """Runs a rank above 0: follows orders until the last one.

    Rank 0 also learns which part of a batch any rank cannot get, and decides: it may write a checkpoint first.
    """
    while True:
        message = msgpack.unpackb(channel.receive())
        match message["order"]:
            case "prepare":
                with contextlib.suppress(UnreachableError, StoreError):
                    worker.prepare(TrainPlan.from_bytes(message["plan"]))
            case "train":
                _train_if_allowed(worker, channel)
            case "export":
                for _ in worker.export():
                    pass
            case "checkpoint":
                # Where it fails it fails on rank 0 too, which decides.
                worker.begin_checkpoint(PolicyVersion.parse(message["version"]), message["extra"])
            case "load":
                worker.load(Path(message["folder"]))
            case "end":
                return
