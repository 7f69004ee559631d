"""The interface of transports other than the Weights service, which serves all versions.

Invariants every offer keeps:

- `offer` returns when the version can be fetched, and never changes it. Versions of equal weights may share their bytes
  (`PublishedVersion.data`): those are written once, and stay until the last of them is retired. A version that cannot
  be offered is no error: `offer` returns None and logs the cause, because the service still serves it.
- After `retire` nothing of the version is left; receivers that are in the middle of it end with whole bytes or with an
  error. `close` retires all.
- No receiver, dead, slow or stopped, holds up `offer`, `retire` or `close`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from rollmesh.learner.weights.published_version import PublishedVersion
from rollmesh.protos import weights_pb2


class SenderTransport(ABC):
    """Makes versions available by one transport. One thread at a time calls `offer` and `retire`."""

    name: str

    @abstractmethod
    def offer(self, version: PublishedVersion) -> weights_pb2.Offer | None:
        """Makes a version available; None where it cannot be.

        Args:
            version: complete, and about to be announced.
        """

    @abstractmethod
    def retire(self, version: PublishedVersion) -> None:
        """Withdraws a version; does nothing for one that was not offered."""

    def close(self) -> None:
        """Releases everything that is kept between versions; they have been retired before."""
        return
