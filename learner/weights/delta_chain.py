"""The chain of deltas that leads receivers from earlier versions to the newest.

Invariants: links are contiguous, each begins where the one before ends, and there are at most `length` of them. Only
versions of equal layout are linked. A link begins and ends at weights, named by their digest: versions of equal weights
share their links. Encoding happens in threads of its own, one link at a time, so that neither training nor the event
loop waits for it. Where versions come faster than they are encoded, the next link leads from the last one's end to the
newest, over those between. A chain without a request for `length` versions is dropped.

Memory: the links themselves, and the version at which the next one begins (mostly one that is kept anyway). Both are
released when the chain is dropped. All methods may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from rollmesh.learner.weights.publish_rules import LINK_SHARE
from rollmesh.learner.weights.published_version import PublishedVersion
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import digest_of
from rollmesh.mesh.weights.delta import Span, encode_bucket, spans_of
from rollmesh.mesh.weights.delta_path import same_layout
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)
# Assumptions about links before one has been measured, or when that was this many versions ago.
_ASSUMED_SHARE = 0.1
_ASSUMED_BYTES_PER_S = 0.5e9
_FORGOTTEN_AFTER = 32


@dataclass(frozen=True, slots=True)
class DeltaLink:
    """A link of the chain: its announcement, and its bytes.

    Attributes:
        base, policy: where it begins and ends.
        delta: as announced; never changed.
        buckets: the encoded delta of each bucket.
    """

    base: PolicyVersion
    policy: PolicyVersion
    delta: weights_pb2.Delta
    buckets: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A finished piece of work; `link` is None where the two versions cannot be linked, or it does not pay."""

    target: PublishedVersion
    link: DeltaLink | None


class DeltaChain:
    """Encodes links on demand and keeps the last ones.

    Args:
        length: links kept.
        changed: called from a thread of the chain when a link is complete, or has failed.
        threads: encode at a time, a bucket each.

    Attributes:
        share: expected bytes of a link as a share of the full bytes; 1 where none is expected to be kept.
        bytes_per_s: of full weights encoded.
    """

    def __init__(self, length: int, changed: Callable[[], None], *, threads: int = 1) -> None:
        self._length = length
        self._changed = changed
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="delta")
        self._encoders = ThreadPoolExecutor(threads, thread_name_prefix="delta-bucket")
        self._closed = False
        self._links: list[DeltaLink] = []
        # Where the next link begins, and the newest version.
        self._tip: PublishedVersion | None = None
        self._newest: PublishedVersion | None = None
        # The target of the link being encoded.
        self._target: PublishedVersion | None = None
        self._wanted_next = False
        self._published_since_link = 0
        self.share = _ASSUMED_SHARE
        self.bytes_per_s = _ASSUMED_BYTES_PER_S

    @property
    def tip(self) -> PublishedVersion | None:
        """The last version that a link leads to; None without links."""
        with self._lock:
            return self._tip if self._links else None

    def set_newest(self, version: PublishedVersion) -> None:
        """Sets the newest version."""
        with self._lock:
            previous, self._newest = self._newest, version
            self._published_since_link += 1
            if self._published_since_link > _FORGOTTEN_AFTER:
                self.share, self.bytes_per_s = _ASSUMED_SHARE, _ASSUMED_BYTES_PER_S
            if self._target is not None:
                return
            if self._published_since_link > self._length:
                self._links.clear()
            if not self._links:
                self._tip = previous

    def request_link(self) -> None:
        """Has a link to the newest version encoded for a receiver, unless it exists already."""
        with self._lock:
            if self._target is not None:
                self._wanted_next = True
            else:
                self._begin()

    def links_to(self, digest: str) -> list[DeltaLink]:
        """The links that lead to weights, oldest first; none where there is no link to them."""
        with self._lock:
            ends = [link.delta.digest for link in self._links]
            return self._links[: ends.index(digest) + 1] if digest in ends else []

    def link_pending(self, base: str) -> bool:
        """True where a link is being encoded that continues a receiver's way from the weights with digest `base`."""
        with self._lock:
            if self._target is None or self._tip is None:
                return False
            if self._wanted_next and base == self._target.manifest.digest:
                return True
            return base == self._tip.manifest.digest or any(base == link.delta.base_digest for link in self._links)

    def bucket(self, base: PolicyVersion, policy: PolicyVersion, index: int) -> bytes:
        """An encoded bucket of the link.

        Raises:
            WeightsError: the link is not kept (any more), or has no such bucket.
        """
        with self._lock:
            link = next((link for link in self._links if (link.base, link.policy) == (base, policy)), None)
        if link is None:
            raise WeightsError(f"no delta from {base} to {policy} is kept", hint="fetch the full bytes instead")
        if index >= len(link.buckets):
            raise WeightsError(f"bucket {index} does not exist, there are {len(link.buckets)}")
        return link.buckets[index]

    def close(self) -> None:
        """Releases everything; a running encoding ends with its bucket."""
        with self._lock:
            self._closed = True
            self._links.clear()
            self._tip = self._newest = None
        self._worker.shutdown(cancel_futures=True)
        self._encoders.shutdown(cancel_futures=True)

    # --------------------------------------------------------------------------------------------------- encoding

    def _begin(self) -> None:
        """Starts on the link from the tip to the newest version; the caller holds the lock."""
        self._wanted_next = False
        base, target = self._tip, self._newest
        if self._closed or base is None or target is None or base.manifest.digest == target.manifest.digest:
            return
        self._target = target
        self._worker.submit(self._work, base, target).add_done_callback(_log_failure)

    def _work(self, base: PublishedVersion, target: PublishedVersion) -> None:
        encoded = None
        try:
            encoded = self._encode(base, target)
        finally:
            self._add_encoded(encoded)

    def _encode(self, base: PublishedVersion, target: PublishedVersion) -> _Encoded:
        if not same_layout(base.manifest, target.manifest):
            return _Encoded(target, None)
        began = time.perf_counter()
        spans = spans_of(target.manifest.tensors, len(target.manifest.buckets))

        def encode(index: int, of_bucket: Sequence[Span]) -> bytes:
            return b"" if self._closed else encode_bucket(base.bucket(index), target.bucket(index), of_bucket)

        buckets = list(self._encoders.map(encode, range(len(spans)), spans))
        full = sum(bucket.nbytes for bucket in target.manifest.buckets)
        share = sum(map(len, buckets)) / full
        with self._lock:
            self.share = share if share <= LINK_SHARE else 1.0
            self.bytes_per_s = full / (time.perf_counter() - began)
        log.debug("link %s to %s: %.2f %% of %d bytes", base.policy, target.policy, 100 * share, full)
        return _Encoded(target, _link(base, target, buckets) if share <= LINK_SHARE else None)

    def _add_encoded(self, encoded: _Encoded | None) -> None:
        """Adds an encoded link to the chain; None: the encoding failed."""
        with self._lock:
            self._target = None
            if self._closed:
                return
            self._published_since_link = 0
            self._tip = encoded.target if encoded is not None else None
            if encoded is not None and encoded.link is not None:
                self._links.append(encoded.link)
                del self._links[: -self._length]
            else:
                self._links.clear()
            if self._wanted_next:
                self._begin()
        self._changed()


def _log_failure(work: Future[None]) -> None:
    error = None if work.cancelled() else work.exception()
    if error is not None:
        log.error("no delta was made; weights are sent in full", exc_info=error)


def _link(base: PublishedVersion, target: PublishedVersion, buckets: Sequence[bytes]) -> DeltaLink:
    delta = weights_pb2.Delta(
        base=base.policy.to_proto(),
        policy=target.policy.to_proto(),
        base_digest=base.manifest.digest,
        digest=target.manifest.digest,
        buckets=[weights_pb2.BucketEntry(nbytes=len(bucket), digest=digest_of(bucket)) for bucket in buckets],
    )
    return DeltaLink(base.policy, target.policy, delta, buckets)
