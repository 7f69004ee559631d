"""Versions of the policy, kept fetchable.

`allocate` takes the memory of a version. The learner's processes write and digest their parts of it
(`learner.weights.version_part`). `complete` makes a manifest of their digests and announces it. Where versions are
adapters, the base to which they belong comes first, as version `FROZEN_BASE`. It is announced with each of them.

Invariants: a version is announced only when it can be fetched. The last `keep_versions` stay fetchable, and so does
the oldest one that is being fetched. A slow connection receives a version in the end, however fast they come. The
others are unlinked; a base stays to the end. Versions of one publisher only go up. Nothing of it is left in shared
memory after `close`, nor after `kill -9` once another publisher starts on the machine.

One thread at a time calls `complete`, `republish` and `publish`; everything else may be called from any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from rollmesh.learner.engines.interface import ExportedTensor
from rollmesh.learner.weights.delta_chain import DeltaChain
from rollmesh.learner.weights.publish_rules import LINK_SHARE, VERSIONS_IN_FLIGHT, PublishRules
from rollmesh.learner.weights.published_version import PublishedVersion
from rollmesh.learner.weights.push_statistics import PushStatistics
from rollmesh.learner.weights.transports import SenderTransport, shared_memory
from rollmesh.learner.weights.version_layout import PartDigests, VersionLayout
from rollmesh.learner.weights.version_part import copy_part, digest_part
from rollmesh.learner.weights.version_storage import VersionFile
from rollmesh.mesh.errors import VersionGoneError, WeightsError
from rollmesh.mesh.runtime.host_memory import free_host_bytes
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import bucket_starts
from rollmesh.mesh.weights.active_readers import ActiveReaders
from rollmesh.mesh.weights.adapter import FROZEN_BASE, attach_base
from rollmesh.mesh.weights.shared_files import SHARED_MEMORY
from rollmesh.mesh.weights.tensors import dtype_of
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)
# At most this many of the learner's compute threads encode deltas.
_ENCODING_THREADS = 4


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
        self._bucket_bytes = rules.bucket_bytes
        self._keep_versions = rules.keep_versions
        # They travel over gRPC.
        self._deltas = rules.chain if self.chain is not None and rules.transport != "shm" else 0
        self._required = rules.transport == "shm"
        local = rules.transport in ("auto", "shm")
        self._shared = shared_memory(directory, required=self._required) if local else None
        self.offers: tuple[SenderTransport, ...] = (*([self._shared] if self._shared else []), *offers)
        self._lock = threading.Lock()
        self._versions: dict[PolicyVersion, PublishedVersion] = {}
        self._adapter_scale = rules.adapter_scale
        self._base: PublishedVersion | None = None
        self._newest: PublishedVersion | None = None
        self._closed = False
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
            found = self._base if policy == FROZEN_BASE else self._versions.get(policy)
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
        links = self.chain.links_to(manifest.digest) if self.chain else []
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

    def reckon_memory(self, nbytes: int, *, base: int = 0) -> None:
        """Reckons before the first version if all that are kept will fit; gives shared memory up where they will not.

        Args:
            nbytes: of a version.
            base: bytes of the base to which versions belong; 0 where they are whole.

        Raises:
            WeightsError: they do not fit into shared memory, and `weights.transport` is `shm`.
        """
        count = self._keep_versions + VERSIONS_IN_FLIGHT
        total = count * nbytes + base
        what = (
            f"{count} versions of the weights (weights.keep_versions, one that is still fetched, and the next), "
            f"{nbytes / 1e9:.2f} GB each"
        )
        if base:
            what += f", and their base, {base / 1e9:.2f} GB"
        lacks = self._shared.shortage(total) if self._shared is not None else ""
        if lacks and self._required:
            raise WeightsError(
                f"weights.transport is shm, but {lacks} for {what}",
                hint="lower weights.keep_versions, enlarge it (containers: --shm-size), or set weights.transport: auto",
            )
        if lacks:
            log.warning("%s for %s: they are sent over grpc; lower weights.keep_versions or enlarge it", lacks, what)
            self.offers, self._shared = tuple(offer for offer in self.offers if offer is not self._shared), None
        available = free_host_bytes()
        needed = total + round(self._deltas * LINK_SHARE * nbytes)
        if needed > available:
            log.warning(
                "%s%s need up to %.2f GB of memory, %.2f GB are available: lower weights.keep_versions%s",
                what,
                f", and {self._deltas} deltas (weights.chain)" if self._deltas else "",
                needed / 1e9,
                available / 1e9,
                " or weights.chain" if self._deltas else "",
            )

    def allocate(self, nbytes: int) -> VersionFile:
        """Memory for one more version, in shared memory where receivers of this host can fetch it from there.

        Raises:
            WeightsError: there is no memory left.
        """
        directory = self._shared.directory if self._shared is not None else None
        return VersionFile(directory, nbytes, fall_back=not self._required)

    def complete(
        self, policy: PolicyVersion, layout: VersionLayout, file: VersionFile, parts: Mapping[int, PartDigests]
    ) -> weights_pb2.Manifest:
        """Announces a version after its parts are written, and releases the oldest.

        Args:
            policy: above every version published before; or `FROZEN_BASE`, which is announced with the next.
            layout: of its bytes.
            file: has them; given up where this fails.
            parts: digests by process.

        Returns:
            The manifest, not to be changed.

        Raises:
            WeightsError: a version that does not go up, or the publisher was closed meanwhile.
        """
        try:
            manifest = layout.manifest(self.run, policy, parts)
            if policy != FROZEN_BASE:
                self._check_goes_up(policy)
                self._attach_base(manifest)
            data = file.seal(f"{self.run}-{policy.incarnation}-{policy.version}")
        except BaseException:
            file.close()
            raise
        published = PublishedVersion(manifest, data, bucket_starts(manifest.buckets))
        return self._keep_base(published) if policy == FROZEN_BASE else self._announce(published)

    def republish(self, policy: PolicyVersion) -> weights_pb2.Manifest:
        """Announces the newest weights under another version: they have not changed, and nothing is written.

        Receivers that have them fetch nothing; others fetch the same bytes.

        Args:
            policy: above every version published before; there is one.

        Returns:
            The manifest, not to be changed.

        Raises:
            WeightsError: a version that does not go up.
        """
        self._check_goes_up(policy)
        newest = self._newest
        assert newest is not None, "a run begins with weights"
        manifest = weights_pb2.Manifest()
        manifest.CopyFrom(newest.manifest)
        manifest.policy.CopyFrom(policy.to_proto())
        del manifest.offers[:]
        return self._announce(PublishedVersion(manifest, newest.data, newest.starts))

    def publish(
        self, policy: PolicyVersion, named_tensors: Iterable[tuple[str, torch.Tensor]], wire_dtype: torch.dtype | str
    ) -> weights_pb2.Manifest:
        """Publishes tensors of this process, at once.

        Args:
            policy: above every version published before.
            named_tensors: (Hugging Face name, tensor), any device. A parameter seen before under another name is sent
                once.
            wire_dtype: dtype in which floating-point tensors travel.

        Returns:
            The manifest, not to be changed.

        Raises:
            WeightsError: no tensors, a dtype that cannot travel, a version that does not go up, or no memory left.
        """
        self._check_goes_up(policy)
        dtype = dtype_of(wire_dtype) if isinstance(wire_dtype, str) else wire_dtype
        tensors: dict[str, torch.Tensor] = {}
        names: dict[torch.Tensor, str] = {}
        ties: dict[str, str] = {}
        for name, tensor in named_tensors:
            if isinstance(tensor, torch.nn.Parameter) and names.setdefault(tensor, name) != name:
                ties[name] = names[tensor]
            else:
                tensors[name] = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype)
        exported = [ExportedTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        return self.publish_in_order(policy, exported, tensors.items(), ties)

    def publish_in_order(
        self,
        policy: PolicyVersion,
        exported: Sequence[ExportedTensor],
        tensors: Iterable[tuple[str, torch.Tensor]],
        ties: Mapping[str, str] | None = None,
    ) -> weights_pb2.Manifest:
        """Publishes tensors of this process, one after the other: only one of them has to be in memory.

        Args:
            policy: above every version published before.
            exported: what comes.
            tensors: in this order, with these dtypes and shapes; each is read before the next is asked for.
            ties: names that share the bytes of another tensor, each with the name of that tensor.

        Returns:
            The manifest, not to be changed.

        Raises:
            WeightsError: no tensors, a dtype that cannot travel, a version that does not go up, or no memory left.
        """
        self._check_goes_up(policy)
        layout = VersionLayout(exported, self._bucket_bytes, ties)
        file = self.allocate(layout.nbytes)
        try:
            copy_part(layout.part(0), tensors, file.view())
            digests = digest_part(layout.part(0), file.view())
        except BaseException:
            file.close()
            raise
        return self.complete(policy, layout, file, {0: digests})

    def close(self) -> None:
        """Withdraws every version."""
        if self.chain is not None:
            self.chain.close()
        with self._lock:
            self._closed = True
            retired = list(self._versions.values())
            self._versions.clear()
            if self._base is not None:
                retired.append(self._base)
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

    def _check_goes_up(self, policy: PolicyVersion) -> None:
        if self._newest is not None and policy <= self._newest.policy:
            raise WeightsError(f"version {policy} was published already, or is older than what was")

    def _attach_base(self, manifest: weights_pb2.Manifest) -> None:
        """Makes the manifest of an adapter's tensors that of a version."""
        if self._adapter_scale is not None:
            assert self._base is not None, "the base comes before its adapters"
            attach_base(manifest, self._base.manifest, self._adapter_scale)

    def _keep_base(self, published: PublishedVersion) -> weights_pb2.Manifest:
        """Makes the base of all adapters fetchable; receivers hear of it with the first of them."""
        published.manifest.offers.extend(self._offers_of(published))
        with self._lock:
            self._base = published
        return published.manifest

    def _offers_of(self, published: PublishedVersion) -> list[weights_pb2.Offer]:
        return [found for found in (offer.offer(published) for offer in self.offers) if found]

    def _announce(self, published: PublishedVersion) -> weights_pb2.Manifest:
        """Makes a version the newest, and releases the oldest."""
        manifest, policy = published.manifest, published.policy
        try:
            manifest.offers.extend(self._offers_of(published))
            manifest.announced_unix_ns = time.time_ns()
            with self._lock:
                if self._closed:
                    raise WeightsError(f"version {policy} was not published: the learner ends")
                self._versions[policy] = published
                self._newest = published
                older = sorted(self._versions)[: -self._keep_versions]
                fetched = next(filter(self.readers.active, older), None)
                retired = [self._versions.pop(old) for old in older if old != fetched]
        except BaseException:
            self._retire([published])
            raise
        if self.chain is not None:
            self.chain.set_newest(published)
            if self.encoding == "delta":
                self.chain.request_link()
        self._retire(retired)
        self.pushes.record_announcement(policy, manifest.announced_unix_ns)
        self._notify_listeners()
        return manifest
