"""Keeps the engine on the newest weights.

Invariants:

- The version in service (`serving`) changes only after the bytes of the new one agreed with their digests and the
  engine has swapped. A failure before that leaves the old version in service and is reported.
- Weights of an incarnation below one already seen, here or by the mesh, are refused.
- Of several announcements only the newest is fetched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import grpc

from rollmesh.generators.engines.adapters import WeightSet
from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.types import SwapTimings
from rollmesh.generators.weights.announced_weights import AnnouncedWeights
from rollmesh.generators.weights.fetcher import Announcement, WeightFetcher
from rollmesh.generators.weights.learner_connection import LearnerConnection, LearnerDirectory
from rollmesh.generators.weights.pinned_groups import PinnedGroups
from rollmesh.generators.weights.relay import Relay
from rollmesh.generators.weights.swap_reports import SwapReporter, failure, success
from rollmesh.generators.weights.transport_log import TransportLog
from rollmesh.generators.weights.transports import transports
from rollmesh.generators.weights.verified_transfer import VerifiedWeights, nothing_received
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.weights import EncodingName, TransportName
from rollmesh.mesh.errors import VersionGoneError, WeightsError
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.runtime.task_group import run_together
from rollmesh.mesh.text import REPORT_CHARACTERS, bounded
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import check_manifest
from rollmesh.mesh.weights.shared_files import SHARED_MEMORY
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)
_FIRST_RETRY_S = 0.2
_LONGEST_RETRY_S = 5.0
# A watch on which nothing came for this long, although the mesh says there are newer weights, is opened again.
_IDLE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverSettings:
    """Identity and rules of a receiver.

    Attributes:
        member_id: of this generator, for reports.
        run: name of the run; weights of another are refused.
        host_id: of this process (`mesh.runtime.hosts`).
        transport: `weights.transport`.
        encoding: `weights.encoding`.
        shared: the tmpfs in which publishers of this host have their files.
        folder: `weights.dir`.
        timeout_s: `weights.timeout_s`.
        streams: `weights.streams`.
        security: token and TLS of the mesh, for connections to other generators.
        serves_adapters: the engine computes with adapters next to their base; else it gets merged weights.
    """

    member_id: str
    run: str
    host_id: str
    transport: TransportName = "auto"
    encoding: EncodingName = "full"
    shared: Path = SHARED_MEMORY
    folder: Path | None = None
    timeout_s: float = 120.0
    streams: int = 2
    security: SecuritySection | None = None
    serves_adapters: bool = False

    @classmethod
    def for_member(cls, config: Config, member_id: str, security: SecuritySection) -> ReceiverSettings:
        """The settings of a run's configuration, for this process."""
        weights = config.weights
        return cls(
            member_id=member_id,
            run=config.run.name,
            host_id=host_id(),
            transport=weights.transport,
            encoding=weights.encoding,
            folder=weights.dir,
            timeout_s=weights.timeout_s,
            streams=weights.streams,
            security=security,
            serves_adapters=config.learner.served_adapter is not None,
        )


class WeightReceiver:
    """Watches the learner, receives, verifies, swaps, reports.

    Args:
        directory: leads to the learner that the mesh names at present.
        engine: takes the tensors.
        settings: see `ReceiverSettings`.
        relay: serves received bytes to others; None: nothing is served.
        pinned: groups for which newer weights wait before they are fetched.
        on_serving: called after each swap, in the event loop.
        on_report: called with each report to the learner, in the event loop.
        suspended: nothing is fetched before `resume`.

    Attributes:
        serving, digest: of the weights in service; None and empty before the first ones.
        waiting_reason: why the newest weights are not in service yet; empty when they are.
        has_weights: set once the first weights are in service.
    """

    def __init__(
        self,
        directory: LearnerDirectory,
        engine: InferenceEngine,
        settings: ReceiverSettings,
        *,
        relay: Relay | None = None,
        pinned: PinnedGroups | None = None,
        on_serving: Callable[[PolicyVersion], None] | None = None,
        on_report: Callable[[weights_pb2.SwapReport], None] | None = None,
        suspended: bool = False,
    ) -> None:
        self._directory = directory
        self._engine = engine
        self._settings = settings
        self._fetcher = WeightFetcher(
            transports(
                settings.host_id,
                shared=settings.shared,
                folder=settings.folder,
                streams=settings.streams,
                security=settings.security,
            ),
            relay or Relay(""),
            transport=settings.transport,
            encoding=settings.encoding,
            timeout_s=settings.timeout_s,
            member_id=settings.member_id,
        )
        self._reporter = SwapReporter(on_report)
        self._pinned = pinned if pinned is not None else PinnedGroups()
        self._pinned.set_cancel_swap(self._hold_swap)
        self._on_serving = on_serving
        # The version in service, and the one that is about to be: the engine changes a moment before `serving`.
        self._announced_weights: dict[PolicyVersion, AnnouncedWeights] = {}
        self._incarnation = 0
        self._swapping: Future[SwapTimings] | None = None
        self._swap_held = False
        self._pending: Announcement | None = None
        self._newest: Announcement | None = None
        self._announced = asyncio.Event()
        self._admitted = asyncio.Event()
        if not suspended:
            self._admitted.set()
        # The task that fetches and swaps, and the last one that `suspend` has ended.
        self._applying: asyncio.Task[None] | None = None
        self._suspended: asyncio.Task[None] | None = None
        self._swapped = asyncio.Event()
        self.serving: PolicyVersion | None = None
        self.digest = ""
        self.waiting_reason = "waits for a learner"
        self.has_weights = asyncio.Event()

    async def run(self) -> None:
        """Runs until cancelled."""
        await run_together(self._watch_learner(), self._apply_unless_suspended())

    async def close(self) -> None:
        """Releases resources that transports keep between transfers; after `run`."""
        await self._fetcher.close()

    async def suspend(self) -> None:
        """Fetches and swaps nothing until `resume`; returns once nothing of that is under way."""
        self._admitted.clear()
        applying = self._applying
        if applying is not None:
            self._suspended = applying
            applying.cancel()
            await asyncio.wait({applying})
        self._pend_newest()

    def resume(self) -> None:
        """Fetches the newest announced version, and those that follow."""
        self._admitted.set()

    async def forget_weights(self) -> None:
        """Records that the engine has no weights; the newest announced are to come in full, and nothing is kept.

        After `suspend`.
        """
        self.serving, self.digest, self._announced_weights = None, "", {}
        await self._fetcher.drop()
        self._pend_newest()

    async def serves(self, policy: PolicyVersion) -> None:
        """Waits until this version or a later one is in service."""
        while self.serving is None or self.serving < policy:
            self._swapped.clear()
            await self._swapped.wait()

    @property
    def chosen(self) -> TransportLog:
        """The transport that brings the weights, and the reasons against cheaper ones."""
        return self._fetcher.chosen

    def announced(self, policy: PolicyVersion) -> AnnouncedWeights | None:
        """The announced weights of a version that the engine serves; None for any other."""
        return self._announced_weights.get(policy)

    # ------------------------------------------------------------------------------------------- announcements

    async def _watch_learner(self) -> None:
        """Follows the learner's announcements, over reconnects and from learner to learner."""
        pause = _FIRST_RETRY_S
        while True:
            if self.serving is None:
                self._set_reason("waits for weights" if self._directory.learner_is_known else "waits for a learner")
            connection = await self._directory.connection()
            try:
                if await self._follow(connection):
                    pause = _FIRST_RETRY_S
            except grpc.aio.AioRpcError as error:
                self._set_reason(f"the learner at {connection.address} does not answer: {error.details()}")
            if not connection.replaced.is_set():
                # The mesh knows first whether the run is finished, or another learner has come.
                await self._directory.refresh()
            await connection.replaced_within(pause)
            pause = min(2 * pause, _LONGEST_RETRY_S)

    async def _follow(self, connection: LearnerConnection) -> bool:
        """Reads one stream of announcements until it ends, idles or another learner comes; True if any came."""
        request = weights_pb2.WatchRequest(member_id=self._settings.member_id, host_id=self._settings.host_id)
        call = connection.weights.Watch(request)
        replaced = asyncio.create_task(connection.replaced.wait())
        read = asyncio.ensure_future(call.read())
        came = False
        try:
            while True:
                done, _ = await asyncio.wait({read, replaced}, timeout=_IDLE_S, return_when=asyncio.FIRST_COMPLETED)
                # Whatever the stream says when its channel is closed: the event was set before.
                if connection.replaced.is_set():
                    return came
                if not done:
                    if self._missed_announcements():
                        log.warning("no announcement for %.0f s, yet there are newer weights: watching again", _IDLE_S)
                        return came
                    continue
                manifest = read.result()
                if manifest is grpc.aio.EOF:
                    return came
                # The first manifest may have been announced long before this receiver came.
                self._on_announcement(manifest, connection, manifest.announced_unix_ns if came else time.time_ns())
                came = True
                read = asyncio.ensure_future(call.read())
        finally:
            replaced.cancel()
            read.cancel()
            call.cancel()

    def _missed_announcements(self) -> bool:
        newest = self._pending.policy if self._pending else self.serving
        in_force = self._directory.policy_in_force
        return in_force is not None and (newest is None or newest < in_force)

    def _on_announcement(self, manifest: weights_pb2.Manifest, connection: LearnerConnection, since_ns: int) -> None:
        policy = PolicyVersion.from_proto(manifest.policy)
        # Useless once another learner has announced something.
        superseded = partial(self._is_superseded, connection)
        announcement = Announcement(manifest, policy, connection, since_ns, superseded)
        if (over := self._fencing_error(policy)) is not None:
            self._refuse(announcement, over)
            return
        if manifest.run != self._settings.run:
            self._refuse(announcement, WeightsError(f"weights of run {manifest.run!r}, this is {self._settings.run!r}"))
            return
        if policy.incarnation > self._incarnation:
            self._incarnation = policy.incarnation
            if self._swapping is not None:
                # A swap to the former learner's weights; the cancellation is too late where the engine is at it
                # already.
                self._swapping.cancel()
        self._newest = announcement
        if self.serving is None or policy > self.serving:
            self._pending = announcement
            self._announced.set()

    def _pend_newest(self) -> None:
        """Has the newest announced version fetched, where it is not in service."""
        newest = self._newest
        if self._pending is None and newest is not None and (self.serving is None or newest.policy > self.serving):
            self._pending = newest
            self._announced.set()

    def _fencing_error(self, policy: PolicyVersion) -> WeightsError | None:
        """The error for a version of a superseded learner; None for the current one."""
        in_force = self._directory.policy_in_force
        newest = max(self._incarnation, in_force.incarnation if in_force is not None else 0)
        if policy.incarnation >= newest:
            return None
        return WeightsError(f"incarnation {policy.incarnation} is over: weights of {newest} have been seen")

    def _is_superseded(self, connection: LearnerConnection) -> bool:
        return self._pending is not None and self._pending.connection is not connection

    def _hold_swap(self) -> None:
        """See `PinnedGroups.hold_swap`."""
        self._swap_held = True
        if self._swapping is not None:
            self._swapping.cancel()

    # ----------------------------------------------------------------------------------------------- transfers

    async def _apply_unless_suspended(self) -> None:
        while True:
            # It may be suspended again by the time at which this task continues. A sleep has no deadline.
            while not self._admitted.is_set():
                await self._admitted.wait()
            self._applying = applying = asyncio.create_task(self._apply_newest(), name="apply-weights")
            try:
                await asyncio.wait({applying})
            finally:
                applying.cancel()
                await asyncio.wait({applying})
                self._applying = None
            if applying is not self._suspended:
                applying.result()

    async def _apply_newest(self) -> None:
        """Puts each newest announcement into service; a failed one is tried again with pauses."""
        pause = _FIRST_RETRY_S
        failed: PolicyVersion | None = None
        while True:
            await self._announced.wait()
            self._set_reason("holds its weights until pinned evaluation groups are done")
            await self._pinned.finished()
            self._announced.clear()
            announcement, self._pending = self._pending, None
            if announcement is None or (self.serving is not None and announcement.policy <= self.serving):
                self._set_reason("")
                continue
            self._set_reason(f"receives version {announcement.policy}")
            try:
                await self._apply(announcement)
            except WeightsError as error:
                if isinstance(error, VersionGoneError) and failed != announcement.policy:
                    # The learner has released it for newer ones: no failure, if these are announced now.
                    self._set_reason(f"version {announcement.policy} was overtaken by newer ones")
                else:
                    self._refuse(announcement, error)
                pause = min(2 * pause, _LONGEST_RETRY_S) if failed == announcement.policy else _FIRST_RETRY_S
                failed = announcement.policy
                await self._retry_after(pause, announcement)
            else:
                failed = None

    async def _apply(self, announcement: Announcement) -> None:
        """Receives a version and puts it into service; weights that are in service already are not received again."""
        manifest = announcement.manifest
        check_manifest(manifest)
        if manifest.digest == self.digest:
            try:
                timings = await self._swap(announcement, None)
            except WeightsError as error:
                if self._fencing_error(announcement.policy) is not None:
                    raise
                log.info("version %s is received again: %s", announcement.policy, error)
            else:
                self._enter_service(announcement, nothing_received(), timings)
                return
        received = await self._fetcher.fetch(announcement)
        timings = await self._swap(announcement, received)
        self._fetcher.set_base(manifest, received)
        self._enter_service(announcement, received, timings)

    async def _swap(self, announcement: Announcement, received: VerifiedWeights | None) -> SwapTimings:
        """Has the engine swap to a version; None: to the same weights under that version."""
        policy, manifest = announcement.policy, announcement.manifest
        if (over := self._fencing_error(policy)) is not None:
            raise over
        self._set_reason(f"waits for the engine to swap to version {policy} (pinned evaluation requests finish first)")
        self._announced_weights[policy] = weights = self._announced_of(announcement, received)
        try:
            timings = None
            while timings is None:
                if self._swap_held:
                    await self._pinned.finished()
                self._swap_held = False
                given = None
                if received is not None:
                    given = weights.for_engine(received.data, with_adapters=self._settings.serves_adapters)
                self._swapping = await self._request_swap(policy, given, manifest.digest)
                timings = await self._await_swap(policy)
        except BaseException:
            del self._announced_weights[policy]
            raise
        return timings

    def _announced_of(self, announcement: Announcement, received: VerifiedWeights | None) -> AnnouncedWeights:
        """The weights of a version; those without bytes of their own have the bytes of the version in service."""
        manifest, serving = announcement.manifest, self.serving
        if not manifest.HasField("base"):
            return AnnouncedWeights(manifest)
        if received is not None:
            return AnnouncedWeights(manifest, received.data, self._fetcher.frozen_base)
        assert serving is not None, "they are in service"
        return replace(self._announced_weights[serving], manifest=manifest)

    async def _request_swap(self, policy: PolicyVersion, weights: WeightSet | None, digest: str) -> Future[SwapTimings]:
        """Has the engine stage tensors; where this task is cancelled meanwhile, they never reach it."""
        staging = asyncio.ensure_future(asyncio.to_thread(self._engine.update_weights, policy, weights, digest))
        try:
            return await asyncio.shield(staging)
        except asyncio.CancelledError:
            # A thread cannot be cancelled.
            await asyncio.wait({staging})
            if staging.exception() is None:
                staging.result().cancel()
            raise

    def _enter_service(self, announcement: Announcement, received: VerifiedWeights, timings: SwapTimings) -> None:
        policy = announcement.policy
        self.serving, self.digest = policy, announcement.manifest.digest
        self._announced_weights = {policy: self._announced_weights[policy]}
        self._set_reason("")
        self.has_weights.set()
        self._swapped.set()
        if self._on_serving is not None:
            self._on_serving(policy)
        report = success(self._settings.member_id, policy, received, timings, announcement.since_ns)
        report.kept_bytes = self._fetcher.kept_bytes
        report.choice = bounded(self.chosen.text, REPORT_CHARACTERS)
        self._reporter.send(announcement.connection, report)

    async def _await_swap(self, policy: PolicyVersion) -> SwapTimings | None:
        """Waits until the engine has swapped; None where `_hold_swap` has cancelled the swap.

        Raises:
            WeightsError: another learner has succeeded while the engine waited.
        """
        swapping, task = self._swapping, asyncio.current_task()
        assert swapping is not None and task is not None, "the engine was asked before"  # noqa: PT018
        if self._swap_held or self._fencing_error(policy) is not None:
            swapping.cancel()
        try:
            return await asyncio.wrap_future(swapping)
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            if (over := self._fencing_error(policy)) is not None:
                raise over from None
            if self._swap_held:
                return None
            raise
        finally:
            self._swapping = None

    async def _retry_after(self, pause_s: float, announcement: Announcement) -> None:
        """Tries the same version again after a pause, unless news come first."""
        try:
            await asyncio.wait_for(self._announced.wait(), pause_s)
        except TimeoutError:
            # News may come at the very moment at which the pause ends.
            if self._pending is None:
                self._pending = announcement
                self._announced.set()

    def _refuse(self, announcement: Announcement, error: WeightsError) -> None:
        log.warning("version %s is not in service: %s", announcement.policy, error)
        self._set_reason(f"version {announcement.policy} could not be taken: {error.message}")
        report = failure(self._settings.member_id, announcement.policy, error, self.digest)
        self._reporter.send(announcement.connection, report)

    def _set_reason(self, reason: str) -> None:
        if reason != self.waiting_reason:
            self.waiting_reason = reason
            if reason:
                log.debug("weights: %s", reason)
