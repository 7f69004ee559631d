"""The announcements to one receiver: at once, or when the delta to the version is encoded.

A version is fetchable at once, its link only once it has been encoded. A receiver that shares memory (or another fast
way) with the learner loses by waiting. One with a slow connection wins: the few bytes of a link come sooner than all of
them. The speed of a receiver's connection is known from its reports of full transfers.

Invariants: no receiver waits longer than a full transfer would have taken beyond that of the link (`delta_wait_s`),
except where `weights.encoding: delta` always asks for links. The first manifest of a stream comes at once, and so do
versions with weights that the stream has announced already. A stream never returns to an older version, and always
reaches the newest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rollmesh.learner.weights.delta_chain import DeltaChain
from rollmesh.learner.weights.publisher import WeightPublisher
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import weights_pb2


def delta_wait_s(full_bytes: int, *, share: float, encoded_bytes_per_s: float, received_bytes_per_s: float) -> float:
    """Seconds for which waiting for a link pays; 0 where the full bytes would be there before it.

    Args:
        full_bytes: of the version.
        share: of them that the link is expected to have.
        encoded_bytes_per_s: of full weights, while the link is made.
        received_bytes_per_s: speed of the receiver's network.
    """
    saved = full_bytes * (1 - share) / received_bytes_per_s
    return saved if saved > full_bytes / encoded_bytes_per_s else 0.0


class AnnouncementStream:
    """The stream of announcements to one receiver.

    Args:
        publisher: announces.
        request: names the receiver.
        clock: seconds, monotonic.
    """

    def __init__(
        self, publisher: WeightPublisher, request: weights_pb2.WatchRequest, clock: Callable[[], float]
    ) -> None:
        self._publisher = publisher
        self._member_id = request.member_id
        self._host_id = request.host_id
        self._clock = clock
        self._sent: PolicyVersion | None = None
        self._sent_digest = ""
        self._until: float | None = None

    def next(self) -> tuple[weights_pb2.Manifest | None, float | None]:
        """The next announcement, if it is due; otherwise the seconds after which to ask again unless there are news.

        Returns:
            A manifest, not to be changed; or None and the seconds (None: only when there are news).
        """
        newest = self._publisher.newest
        if newest is None or PolicyVersion.from_proto(newest.policy) == self._sent:
            return None, None
        chain = self._publisher.chain
        if chain is None or self._sent is None or newest.digest == self._sent_digest:
            return self._announce(newest), None
        tip = chain.tip
        if tip is not None and tip.policy > self._sent and self._continues(chain, tip.manifest.digest):
            return self._announce(tip.manifest), None
        remaining = self._remaining_wait(newest, chain)
        if remaining > 0 and chain.link_pending(self._sent_digest):
            return None, remaining if remaining < math.inf else None
        return self._announce(newest), None

    def _announce(self, manifest: weights_pb2.Manifest) -> weights_pb2.Manifest:
        self._sent, self._sent_digest = PolicyVersion.from_proto(manifest.policy), manifest.digest
        self._until = None
        return self._publisher.with_links(manifest)

    def _continues(self, chain: DeltaChain, digest: str) -> bool:
        return any(link.delta.base_digest == self._sent_digest for link in chain.links_to(digest))

    def _remaining_wait(self, newest: weights_pb2.Manifest, chain: DeltaChain) -> float:
        """Seconds left to wait, counted from the first version that this stream has not announced."""
        if self._until is None:
            self._until = self._clock() + self._longest_wait(newest, chain)
        remaining = self._until - self._clock()
        if remaining > 0:
            chain.request_link()
        return remaining

    def _longest_wait(self, newest: weights_pb2.Manifest, chain: DeltaChain) -> float:
        if self._publisher.encoding == "delta":
            return math.inf
        if any(offer.host_id in ("", self._host_id) for offer in newest.offers):
            return 0.0
        received = self._publisher.pushes.bytes_per_s(self._member_id)
        if received is None:
            return 0.0
        full = sum(bucket.nbytes for bucket in newest.buckets)
        return delta_wait_s(
            full, share=chain.share, encoded_bytes_per_s=chain.bytes_per_s, received_bytes_per_s=received
        )
