"""The interface of transports, which move the bytes of a version from the learner, or from another generator, to here.

Invariants every transport keeps (the contract suite in `tests/generators/weights/transports/contract.py` checks them):

- `receive` gives all buckets, or fails with a WeightsError within its deadline; it never waits in silence.
- It reports each bucket when its bytes are there (`arrived`), once, in any order. The caller verifies them: damage ends
  at its digests.
- Cancelled or failed, it leaves nothing: no file, no process, no group that others would wait for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from rollmesh.generators.weights.learner_connection import LearnerConnection
from rollmesh.mesh.weights import BucketSet


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer of one version.

    Attributes:
        bucket_set: the bytes.
        connection: to the learner that announced them.
        timeout_s: seconds without a byte after which the transfer has failed.
        superseded: True once the bytes are of no use, because another learner has announced its own weights.
        member_id: of the receiver.
        relay_address: address at which the receiver relays the bytes; empty where it does not.
    """

    bucket_set: BucketSet
    connection: LearnerConnection
    timeout_s: float
    superseded: Callable[[], bool]
    member_id: str
    relay_address: str = ""


@dataclass(frozen=True, slots=True)
class Received:
    """The bytes of all buckets, not verified.

    Attributes:
        data: all buckets, concatenated (`BucketSet.starts`); alive as long as this object or a view of it.
        source: address of the generator that sent them; empty for the learner.
    """

    data: memoryview
    source: str = ""


class Transport(ABC):
    """A way of receiving weights. Used in one event loop, for one transfer at a time.

    Attributes:
        alone: where it is configured, bytes that it cannot bring do not come over another one either.
        relays: others may be sent here for the bytes that this receives.
    """

    name: str
    relays: ClassVar[bool] = False
    alone: ClassVar[bool] = False

    @abstractmethod
    def refusal(self, bucket_set: BucketSet) -> str:
        """The reason why these bytes cannot come over this transport; empty where they can."""

    @abstractmethod
    async def receive(self, transfer: Transfer, arrived: Callable[[memoryview, int], None]) -> Received:
        """Gets all buckets.

        Args:
            transfer: of buckets for which `refusal` was empty.
            arrived: called with all buckets' memory and the index of the one that has arrived.

        Raises:
            WeightsError: they did not come; says why.
        """

    async def close(self) -> None:
        """Releases resources that are kept between transfers."""
        return
