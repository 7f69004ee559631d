"""The ranks of a role as one: rank 0 follows the learner's requests, the others follow rank 0.

The event loop's thread takes requests, the main thread computes: an engine runs in one thread.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import msgpack
import numpy as np

from rollmesh.learner.distributed.rank_channel import RankChannel
from rollmesh.learner.liveness.rank_watch import RankWatch
from rollmesh.learner.role_service.role_worker import RoleWorker
from rollmesh.learner.roles.tensor_parts import Arrays
from rollmesh.mesh.errors import RollmeshError

_WAIT, _END = "wait", "end"
_KEEP_ALIVE_S = 30.0
# Requests of the learner, which the ranks follow together.
_ORDERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "attach": RoleWorker.attach,
        "put": RoleWorker.put,
        "infer": RoleWorker.infer,
        "accumulate": RoleWorker.accumulate,
        "apply": RoleWorker.apply,
        "discard": RoleWorker.discard,
        "begin_checkpoint": RoleWorker.begin_checkpoint,
    }
)


class RoleRanks:
    """Rank 0 of a role's processes.

    Args:
        worker: of rank 0.
        channel: to the other ranks; None: there are none.
        watch: of this rank.
    """

    def __init__(self, worker: RoleWorker, channel: RankChannel | None, watch: RankWatch) -> None:
        self._worker = worker
        self._channel = channel
        self._watch = watch
        self._requests: queue.SimpleQueue[tuple[Future[Any], str, dict[str, Any]] | None] = queue.SimpleQueue()

    def submit(self, order: str, **arguments: Any) -> Future[Any]:
        """Has the main thread do something after all that was asked for before; from any thread."""
        future: Future[Any] = Future()
        self._requests.put((future, order, arguments))
        return future

    @property
    def written(self) -> Future[None]:
        """See `RoleWorker.written`."""
        return self._worker.written

    def stop(self) -> None:
        """Ends `serve` after all that was asked for before; from any thread."""
        self._requests.put(None)

    def serve(self) -> None:
        """Follows requests until `stop`, in the thread that computes.

        Raises:
            Exception: no request can have caused it; the processes must end.
        """
        keep_alive_s = _KEEP_ALIVE_S
        if self._channel is not None:
            keep_alive_s = min(_KEEP_ALIVE_S, self._channel.order_timeout_s / 3)
        while True:
            try:
                request = self._requests.get(timeout=keep_alive_s)
            except queue.Empty:
                self._send(_WAIT, {})
                continue
            if request is None:
                self._send(_END, {})
                return
            future, order, arguments = request
            try:
                with self._watch.phase(order):
                    self._send(order, arguments)
                    future.set_result(_ORDERS[order](self._worker, **arguments))
            except RollmeshError as refused:
                future.set_exception(refused)
            except BaseException as error:
                # Whatever ends the process, also an interrupt: the learner's call ends too, and does not wait for it.
                future.set_exception(error)
                raise

    def _send(self, order: str, arguments: Mapping[str, Any]) -> None:
        if self._channel is not None:
            packed = {name: _pack(value) if name == "tensors" else value for name, value in arguments.items()}
            self._channel.send(msgpack.packb({"order": order, "arguments": packed}))


def follow(worker: RoleWorker, channel: RankChannel, watch: RankWatch) -> None:
    """Runs a rank above 0 of a role's processes: follows rank 0 until the end."""
    while True:
        with watch.phase("wait for an order"):
            message = msgpack.unpackb(channel.receive())
        order, arguments = message["order"], message["arguments"]
        if order == _END:
            return
        if order == _WAIT:
            continue
        if "tensors" in arguments:
            arguments["tensors"] = _unpack(arguments["tensors"])
        # A request that is refused here is refused on rank 0 too, which answers.
        with watch.phase(order), contextlib.suppress(RollmeshError):
            _ORDERS[order](worker, **arguments)


def _pack(tensors: Arrays) -> list[list[Any]]:
    return [[name, array.dtype.str, list(array.shape), array.tobytes()] for name, array in tensors.items()]


def _unpack(packed: list[list[Any]]) -> Arrays:
    # Copies, for tensors that share memory with bytes could not be written to.
    return {name: np.frombuffer(data, dtype).reshape(shape).copy() for name, dtype, shape, data in packed}
