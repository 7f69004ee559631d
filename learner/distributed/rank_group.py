"""The ranks as one: rank 0 gives orders, the others follow them.

Rank 0 alone talks to the buffer about batches. It sends its decisions to the others as messages (msgpack over a gloo
broadcast), then every rank does the same with its `Worker`. With one rank nothing is sent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollmesh.learner.batching.types import Packing
from rollmesh.learner.distributed.rank_channel import RankChannel
from rollmesh.learner.distributed.rank_payloads import Unusable
from rollmesh.learner.distributed.train_plan import TrainPlan
from rollmesh.learner.distributed.turn_memory import TurnMemory
from rollmesh.learner.distributed.weight_export import PUBLICATION_S, VersionSink, WeightExport
from rollmesh.learner.distributed.worker import TrainResult, UpdateRefused, Worker
from rollmesh.learner.liveness.rank_watch import RankWatch
from rollmesh.mesh.errors import StoreError, SwapError, UnreachableError, WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import weights_pb2

KEEP_ALIVE_S = 30.0
"""Longest wait of rank 0 before it asks the other ranks to keep waiting; a third of what they wait, if that is less."""
# Answers to ranks with a ready update; after the last one they ask no more.
_YES, _NO, _WAIT = b"yes", b"no", b"wait"


class RankGroup:
    """Rank 0's view of all ranks.

    Args:
        worker: of rank 0.
        channel: to the other ranks; None for a single rank.
        watch: of this rank.
        export: rank 0's; None where nothing is published.
    """

    def __init__(
        self, worker: Worker, channel: RankChannel | None, watch: RankWatch, export: WeightExport | None = None
    ) -> None:
        self._worker = worker
        self._channel = channel
        self._watch = watch
        self._export = export
        self._asked = False

    @property
    def alone(self) -> bool:
        """There is no other process."""
        return self._channel is None

    @property
    def keep_alive_s(self) -> float:
        """Seconds after which `keep_alive` is due in a wait of rank 0."""
        return KEEP_ALIVE_S if self._channel is None else min(KEEP_ALIVE_S, self._channel.order_timeout_s / 3)

    @property
    def dp_sizes(self) -> set[int]:
        """Numbers of data-parallel ranks of the models."""
        return self._worker.dp_sizes

    @property
    def packing(self) -> Packing:
        """The packing that all models of the run can take."""
        return self._worker.packing

    def sequence_cost(
        self, tokens: NDArray[np.int64], context: NDArray[np.int64], again: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Cost of tokens after a context, and of repeated prompts, over all models of the run."""
        return self._worker.sequence_cost(tokens, context, again)

    def prepare(self, plan: TrainPlan) -> Unusable:
        """Gives every rank its share; returns the groups that cannot be trained, and why."""
        with self._watch.phase("prepare"):
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

        def ask() -> None:
            self._asked = True
            try:
                allowed = may_update()
            finally:
                self._asked = False
            if self._channel is not None:
                self._channel.send(_YES if allowed else _NO)
            if not allowed:
                raise UpdateRefused

        self._worker.memory.require()
        with self._watch.phase("train"):
            self._send_order("train")
            try:
                return self._worker.train(ask)
            except UpdateRefused:
                return None

    def log_probs(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The policy's log-probs of a sequence at temperature 1, see `Worker.log_probs`.

        Args:
            token_ids: int32 [T].

        Returns:
            float32 [T - 1].
        """
        self._worker.memory.require()
        with self._watch.phase("log_probs"):
            self._send_order("log_probs", tokens=token_ids.astype("<i4").tobytes())
            return self._worker.log_probs(token_ids)

    @property
    def version_bytes(self) -> int:
        """Bytes of one version of the weights."""
        assert self._export is not None, "weights are published"
        return self._export.layout.nbytes

    @property
    def base_bytes(self) -> int:
        """Bytes of the base to which versions of the weights belong; 0 where they are whole."""
        assert self._export is not None, "weights are published"
        return self._export.base_bytes

    def export_base(self, sink: VersionSink) -> None:
        """Publishes the base to which versions belong, before the first of them; nothing where they are whole.

        Raises:
            WeightsError: it could not be stored.
        """
        if not self.base_bytes:
            return
        assert self._export is not None, "weights are published"
        self._worker.memory.require()
        with self._watch.phase("export base"):
            self._send_order("export base")
            published = self._export.export_base(sink)
        if not wait_keeping_alive(self, published, PUBLICATION_S):
            raise WeightsError(
                f"the base of the adapter was not published within {PUBLICATION_S:.0f} s",
                hint="look whether another rank hangs, or weights.dir is slow",
            )
        published.result()

    def export(self, sink: VersionSink, policy: PolicyVersion) -> Future[weights_pb2.Manifest | None]:
        """Has every rank copy its part of the weights, and publishes them in the background (`WeightExport`)."""
        assert self._export is not None, "weights are published"
        self._worker.memory.require()
        with self._watch.phase("export"):
            self._send_order("export", version=str(policy))
            return self._export.export(sink, policy)

    def begin_checkpoint(self, version: PolicyVersion, extra: dict[str, object]) -> Future[Path]:
        """Has a checkpoint written, each rank its part; their state is copied when this returns."""
        self._worker.memory.require()
        with self._watch.phase("checkpoint"):
            self._send_order("checkpoint", version=str(version), extra=extra)
            return self._worker.begin_checkpoint(version, extra)

    def load(self, folder: Path) -> dict[str, object]:
        """Restores a checkpoint on every rank."""
        self._worker.memory.require()
        with self._watch.phase("load"):
            self._send_order("load", folder=str(folder))
            return self._worker.load(folder)

    def attach_roles(self, incarnation: int) -> None:
        """Has the roles elsewhere serve this learner; see `Worker.attach_roles`."""
        with self._watch.phase("attach roles"):
            self._send_order("attach_roles", incarnation=incarnation)
            self._worker.attach_roles(incarnation)

    def offload(self) -> TurnMemory:
        """Moves the memory of all roles away from the devices of every rank; see `RolesMemory`.

        Until `onload` every order that needs models is refused with a RuntimeError; `prepare` needs none.

        Raises:
            SwapError: a rank has no room for it elsewhere; all ranks have kept it.
        """
        with self._watch.phase("offload"):
            self._send_order("offload")
            return self._worker.memory.offload()

    def onload(self) -> None:
        """Brings back what a turn needs.

        Raises:
            MemoryError: the devices of a rank have no room for it; all ranks have it away as before.
        """
        with self._watch.phase("onload"):
            self._send_order("onload")
            self._worker.memory.onload()

    def keep_alive(self) -> None:
        """Keeps the others' wait for an order, or for the answer of `may_update`, from timing out."""
        if self._asked:
            if self._channel is not None:
                self._channel.send(_WAIT)
            return
        with self._watch.phase("wait"):
            self._send_order("wait")

    def shutdown(self) -> None:
        """Ends the others' work."""
        with self._watch.phase("end"):
            self._send_order("end")

    def _send_order(self, order: str, **arguments: Any) -> None:
        if self._channel is not None:
            self._channel.send(msgpack.packb({"order": order, **arguments}))


def wait_keeping_alive(ranks: RankGroup, future: Future[Any], most_s: float) -> bool:
    """Waits on rank 0 for a future, and keeps the other ranks waiting meanwhile.

    Returns:
        False where it is not done after `most_s` seconds.
    """
    until = time.monotonic() + most_s
    while (left_s := until - time.monotonic()) > 0:
        if wait([future], min(ranks.keep_alive_s, left_s)).done:
            return True
        ranks.keep_alive()
    return future.done()


def _train_if_allowed(worker: Worker, channel: RankChannel) -> None:
    def ask() -> None:
        while (answer := channel.receive()) == _WAIT:
            pass
        if answer != _YES:
            raise UpdateRefused

    with contextlib.suppress(UpdateRefused):
        worker.train(ask)


def run_follower(worker: Worker, channel: RankChannel, watch: RankWatch, export: WeightExport | None = None) -> None:
    """Runs a rank above 0: follows orders until the last one.

    Rank 0 also learns which part of a batch any rank cannot get, and decides: it may write a checkpoint first.
    """
    order = ""
    while order != "end":
        with watch.phase("wait for an order"):
            message = msgpack.unpackb(channel.receive())
        order = message["order"]
        with watch.phase(order):
            _follow(worker, channel, message, export)


def _follow(worker: Worker, channel: RankChannel, message: Mapping[str, Any], export: WeightExport | None) -> None:
    match message["order"]:
        case "prepare":
            with contextlib.suppress(UnreachableError, StoreError):
                worker.prepare(TrainPlan.from_bytes(message["plan"]))
        case "train":
            _train_if_allowed(worker, channel)
        case "export base":
            assert export is not None, "rank 0 publishes"
            export.export_base(None)
        case "export":
            assert export is not None, "rank 0 publishes"
            export.export(None, PolicyVersion.parse(message["version"]))
        case "checkpoint":
            # Where it fails it fails on rank 0 too, which decides.
            worker.begin_checkpoint(PolicyVersion.parse(message["version"]), message["extra"])
        case "load":
            worker.load(Path(message["folder"]))
        case "log_probs":
            worker.log_probs(np.frombuffer(message["tokens"], dtype="<i4"))
        case "attach_roles":
            worker.attach_roles(message["incarnation"])
        case "offload":
            # Rank 0 fails too, and decides.
            with contextlib.suppress(SwapError):
                worker.memory.offload()
        case "onload":
            with contextlib.suppress(MemoryError):
                worker.memory.onload()
