"""Messages between the ranks."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rollmesh.learner.engines.world import gather_bytes
from rollmesh.mesh.config.learner import DistributedSection


class RankChannel:
    """A gloo group over all ranks for messages, whatever backend the engine uses; making it is collective.

    Each channel belongs to one thread of every rank. `World.lend_group` has no group for it: here the others may wait
    longer for rank 0 than for one another in an exchange.

    Args:
        limits: rank 0 sends within `timeout_s`, and the others wait `order_timeout_s` for it.

    Attributes:
        order_timeout_s: longest wait of the others.
    """

    def __init__(self, limits: DistributedSection) -> None:
        self.order_timeout_s = limits.order_timeout_s
        self._send_within = timedelta(seconds=limits.timeout_s)
        self._receive_within = timedelta(seconds=limits.order_timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=self._receive_within)

    def send(self, message: bytes) -> None:
        """Sends bytes from rank 0 to all others, and waits until they take them."""
        self._broadcast(torch.tensor([len(message)]), self._send_within)
        if message:
            self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), self._send_within)

    def receive(self) -> bytes:
        """The next message of rank 0, on another rank."""
        length = torch.zeros(1, dtype=torch.int64)
        self._broadcast(length, self._receive_within)
        data = torch.empty(int(length), dtype=torch.uint8)
        if length:
            self._broadcast(data, self._receive_within)
        return data.numpy().tobytes()

    def _broadcast(self, data: Tensor, timeout: timedelta) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, timeout
        self._group.broadcast([data], options).wait()

    def gather(self, message: bytes) -> list[bytes]:
        """Every rank's message, in the order of the ranks; collective."""
        return gather_bytes(message, self._group)
