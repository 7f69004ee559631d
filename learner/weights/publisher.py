"""Versions of the policy, kept fetchable.

Invariants: `publish` returns only when the version can be fetched. The last `keep_versions` stay fetchable, and so does
the oldest one that is being fetched. A slow connection receives a version in the end, however fast they come. The
others are unlinked. Versions of one publisher only go up. Nothing of it is left in shared memory after `close`, nor
after `kill -9` once another publisher starts on the machine.

`publish` belongs to the thread that trains; everything else may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rollmesh.learner.weights.delta_chain import DeltaChain
from rollmesh.learner.weights.published_version import PublishedVersion
from rollmesh.learner.weights.push_statistics import PushStatistics
from rollmesh.learner.weights.transports import SenderTransport, shared_memory
from rollmesh.learner.weights.version_storage import VersionBytes, VersionWriter
from rollmesh.mesh.config.weights import EncodingName, TransportName, WeightsSection
from rollmesh.mesh.errors import VersionGoneError, WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import ALIGNMENT, BucketLayout, Digest, bucket_starts, digest_of, manifest_digest
from rollmesh.mesh.weights.active_readers import ActiveReaders
from rollmesh.mesh.weights.layout import DTYPE_BYTES
from rollmesh.mesh.weights.shared_files import SHARED_MEMORY
from rollmesh.mesh.weights.tensors import bytes_of, dtype_name, dtype_of, to_wire
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)
_PADDING = bytes(ALIGNMENT)
# At most this many of the learner's compute threads encode deltas.
_ENCODING_THREADS = 4


@dataclass(frozen=True, slots=True)
class PublishRules:
    """Rules of publication; the fields are those of `weights` in the configuration.

    Attributes:
        keep_versions: versions that stay fetchable.
        bucket_bytes: size of a bucket, the unit of transfer and of digests.
        transport: `shm`: shared memory must work; `auto`: it is used where possible; others: not.
        encoding: `full`: no deltas are made; `delta`: of every version; `auto`: on request.
        chain: deltas kept.
    """

    keep_versions: int = 2
    bucket_bytes: int = 64 << 20
    transport: TransportName = "auto"
    encoding: EncodingName = "full"
    chain: int = 4

    @classmethod
    def of(cls, weights: WeightsSection) -> PublishRules:
        """The rules of a configuration."""
        return cls(weights.keep_versions, weights.bucket_bytes, weights.transport, weights.encoding, weights.chain)


class WeightPublisher:
    """Holds the versions that generators may fetch.

    Args:
        run: name of the run.
        model_bundle: files from which model and tokenizer are built (`read_model_bundle`).
        rules: of the run.
        directory: the tmpfs for shared files.
        offers: transports other than shared memory; the publisher closes them.

    Raises:
        WeightsError: `shm` was asked for and the directory is not usable.
    """

    def __init__(
        self,
        run: str,
        model_bundle: Mapping[str, bytes],
        rules: PublishRules | None = None,
        *,
        directory: Path = SHARED_MEMORY,
        offers: Sequence[SenderTransport] = (),
    ) -> None:
        rules = rules or PublishRules()
        self.run = run
        self.encoding = rules.encoding
        threads = min(_ENCODING_THREADS, torch.get_num_threads())
        self.chain = (
            DeltaChain(rules.chain, self._notify_listeners, threads=threads) if rules.encoding != "full" else None
        )
        self.model_bundle = dict(model_bundle)
        self.pushes = PushStatistics()
        self.readers = ActiveReaders()
        self._keep_versions = rules.keep_versions
        self._bucket_bytes = rules.bucket_bytes
        self._required = rules.transport == "shm"
        local = rules.transport in ("auto", "shm")
        shared = shared_memory(directory, required=self._required) if local else None
        self.offers: tuple[SenderTransport, ...] = (*([shared] if shared else []), *offers)
        self._lock = threading.Lock()
        self._versions: dict[PolicyVersion, PublishedVersion] = {}
        self._newest: PublishedVersion | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def newest(self) -> weights_pb2.Manifest | None:
        """The manifest in force; None before the first `publish`."""
        newest = self._newest
        return newest.manifest if newest else None

    def version(self, policy: PolicyVersion) -> PublishedVersion:
        """A version that is still kept.

        Raises:
            VersionGoneError: it is not kept.
        """
        with self._lock:
            found = self._versions.get(policy)
            tip = self.chain.tip if self.chain else None
            if found is None and tip is not None and tip.policy == policy:
                return tip
            kept = ", ".join(map(str, self._versions)) or "none"
        if found is None:
            message = f"version {policy} is not kept any more (kept: {kept})"
            raise VersionGoneError(message, hint="fetch the newest instead")
        return found

    def bucket(self, policy: PolicyVersion, index: int, base: PolicyVersion | None = None) -> memoryview:
        """The bytes of one bucket, without a copy.

        Args:
            policy: the version.
            index: of the bucket.
            base: for the delta that leads from there to `policy`; None: the full bytes.

        Raises:
            WeightsError: the version or the delta is not kept (any more), or has no such bucket.
        """
        if base is None:
            version = self.version(policy)
            if index >= len(version.manifest.buckets):
                raise WeightsError(f"bucket {index} does not exist, there are {len(version.manifest.buckets)}")
            return version.bucket(index)
        if self.chain is None:
            raise WeightsError("no deltas are made here: weights.encoding is full", hint="fetch the full bytes")
        return memoryview(self.chain.bucket(base, policy, index))

    def with_links(self, manifest: weights_pb2.Manifest) -> weights_pb2.Manifest:
        """The manifest of one of its versions, with the deltas that lead there at present."""
        links = self.chain.links_to(PolicyVersion.from_proto(manifest.policy)) if self.chain else []
        if not links:
            return manifest
        linked = weights_pb2.Manifest()
        linked.CopyFrom(manifest)
        linked.deltas.extend(link.delta for link in links)
        return linked

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener` after each `publish` and each new delta, in any thread; returns its unsubscription."""
        with self._lock:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._lock:
                self._listeners.remove(listener)

        return unsubscribe

    def publish(
        self, policy: PolicyVersion, named_tensors: Iterable[tuple[str, torch.Tensor]], wire_dtype: torch.dtype | str
    ) -> weights_pb2.Manifest:
        """Copies the tensors, announces the version and releases the oldest.

        Args:
            policy: above every version published before.
            named_tensors: (Hugging Face name, tensor), any device, each read once before the next is asked for. A
                tensor seen before under another name is sent once.
            wire_dtype: dtype in which floating-point tensors travel.

        Returns:
            The manifest, not to be changed.

        Raises:
            WeightsError: no tensors, a dtype that cannot travel, a version that does not go up, or no memory left.
        """
        if self._newest is not None and policy <= PolicyVersion.from_proto(self._newest.manifest.policy):
            raise WeightsError(f"version {policy} was published already, or is older than what was")
        manifest = weights_pb2.Manifest(run=self.run, policy=policy.to_proto())
        dtype = dtype_of(wire_dtype) if isinstance(wire_dtype, str) else wire_dtype
        data = self._write(manifest, named_tensors, dtype)
        manifest.digest = manifest_digest(manifest.tensors)
        published = PublishedVersion(manifest, data, bucket_starts(manifest.buckets))
        try:
            manifest.offers.extend(found for found in (offer.offer(published) for offer in self.offers) if found)
        except BaseException:
            self._retire([published])
            raise
        manifest.announced_unix_ns = time.time_ns()
        with self._lock:
            self._versions[policy] = published
            self._newest = published
            older = sorted(self._versions)[: -self._keep_versions]
            fetched = next(filter(self.readers.active, older), None)
            retired = [self._versions.pop(old) for old in older if old != fetched]
        if self.chain is not None:
            self.chain.set_newest(published)
            if self.encoding == "delta":
                self.chain.request_link()
        self._retire(retired)
        self.pushes.record_announcement(policy, manifest.announced_unix_ns)
        self._notify_listeners()
        # Giving memory back takes the kernel as long as filling it did: a third of a second per gigabyte, seen here.
        threading.Thread(target=retired.clear, name="free-weights").start()
        return manifest

    def close(self) -> None:
        """Withdraws every version."""
        if self.chain is not None:
            self.chain.close()
        with self._lock:
            retired = list(self._versions.values())
            self._versions.clear()
        self._retire(retired)
        for offer in self.offers:
            offer.close()

    def _notify_listeners(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def _retire(self, versions: Iterable[PublishedVersion]) -> None:
        for version in versions:
            for offer in self.offers:
                offer.retire(version)

    def _write(
        self,
        manifest: weights_pb2.Manifest,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype,
    ) -> VersionBytes:
        directory = next((offer.directory for offer in self.offers if offer.directory), None)
        writer = VersionWriter(directory, fall_back=not self._required)
        try:
            total = _fill(writer, manifest, named_tensors, dtype, BucketLayout(self._bucket_bytes))
            if total == 0:
                raise WeightsError(f"version {PolicyVersion.from_proto(manifest.policy)} has no weights")
        except BaseException:
            writer.abandon()
            raise
        return writer.seal(f"{self.run}-{manifest.policy.incarnation}-{manifest.policy.version}", total)


def _fill(
    writer: VersionWriter,
    manifest: weights_pb2.Manifest,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    layout: BucketLayout,
) -> int:
    """Writes the tensors and lists them and their buckets; returns the bytes written, padding included."""
    bucket_digest = Digest()
    sent: dict[int, str] = {}
    kept: list[torch.Tensor] = []
    for name, tensor in named_tensors:
        if isinstance(tensor, torch.nn.Parameter):
            # Parameters stay alive during the publish, so that their identity shows ties. Other tensors may be
            # temporary and share an address with one that is gone.
            if id(tensor) in sent:
                twin = sent[id(tensor)]
                manifest.tensors.add(name=name, dtype=_wire_name(tensor, dtype), shape=tensor.shape, tied_to=twin)
                continue
            sent[id(tensor)] = name
            kept.append(tensor)
        ready = to_wire(tensor, dtype)
        if dtype_name(ready.dtype) not in DTYPE_BYTES:
            hint = f"known: {', '.join(DTYPE_BYTES)}"
            raise WeightsError(f"tensor {name} has dtype {dtype_name(ready.dtype)}, which cannot be sent", hint=hint)
        data = bytes_of(ready)
        place = layout.place(data.nbytes)
        if place.opens_bucket:
            if manifest.buckets:
                manifest.buckets[-1].digest = bucket_digest.hexdigest()
            manifest.buckets.add()
            bucket_digest = Digest()
        writer.write(data, place.start)
        bucket_digest.update(_PADDING[: place.padding])
        bucket_digest.update(data)
        manifest.buckets[-1].nbytes = place.offset + data.nbytes
        manifest.tensors.add(
            name=name,
            dtype=dtype_name(ready.dtype),
            shape=ready.shape,
            digest=digest_of(data),
            bucket=place.bucket,
            offset=place.offset,
            nbytes=data.nbytes,
        )
    if manifest.buckets:
        manifest.buckets[-1].digest = bucket_digest.hexdigest()
    return layout.total_bytes


def _wire_name(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    return dtype_name(dtype if tensor.is_floating_point() else tensor.dtype)
