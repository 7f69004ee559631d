"""What moves the bytes of a version from the learner, or from another generator, to here.

Invariants every transport keeps (the contract suite in `tests/generators/weights/transports/contract.py` checks them):

- `receive` gives all buckets, or fails with a WeightsError within its deadline; it never waits in silence.
- It says of each bucket when its bytes are there (`arrived`), once, in any order; the caller verifies them. What a
  transport gives is unverified: damage ends at the caller's digests, whatever the transport.
- Cancelled or failed, it leaves nothing behind: no file, no process, no group that others would wait for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from rollmesh.generators.weights.learner_connection import LearnerConnection
from rollmesh.mesh.weights import Wanted


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer.

    Attributes:
        wanted: the bytes.
        connection: to the learner that announced them.
        timeout_s: without a byte for so long, the transfer has failed.
        superseded: whether going on is pointless, because another learner has announced its own weights.
        member_id: of the receiver.
        relay_address: where the receiver serves others what it receives; empty where it does not.
    """

    wanted: Wanted
    connection: LearnerConnection
    timeout_s: float
    superseded: Callable[[], bool]
    member_id: str
    relay_address: str = ""


@dataclass(frozen=True, slots=True)
class Received:
    """The bytes of all buckets, not verified.

    Attributes:
        data: all buckets, concatenated (`Wanted.starts`); alive as long as this object or a view of it.
        source: address of whom they came from; empty for the learner.
    """

    data: memoryview
    source: str = ""


class Transport(ABC):
    """Receives with one technique. Used in one event loop, for one transfer at a time.

    Attributes:
        alone: where it is the one that is asked for, what it cannot bring does not come any other way either.
        relays: others may be sent here for what this receives.
    """

    name: str
    relays: ClassVar[bool] = False
    alone: ClassVar[bool] = False

    @abstractmethod
    def refusal(self, wanted: Wanted) -> str:
        """Why these bytes cannot come this way; empty where they can."""

    @abstractmethod
    async def receive(self, transfer: Transfer, arrived: Callable[[memoryview, int], None]) -> Received:
        """Gets all buckets.

        Args:
            transfer: what is wanted, for which `refusal` was empty.
            arrived: called with all buckets' memory and the index of one, whose bytes are there.

        Raises:
            WeightsError: they did not come; says why.
        """

    async def close(self) -> None:
        """Gives back what is kept between transfers."""
        return
