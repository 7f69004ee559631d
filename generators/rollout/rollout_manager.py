"""The rollout loop: grants in, requests to an engine or agents, finished groups out.

Invariants:

- Every grant ends here in exactly one of three ways. All its missing members are delivered; it is released; or it was
  lost to another holder, or cancelled, and dropped.
- A group is submitted to scoring whole, or in parts once its first finished member has waited `PARTIAL_AFTER_S`: a
  crash costs no more than that. Where rewards need groups it waits for all. Its finished members are stored before it
  is released.
- Members of a dropped group are aborted in the engine and never delivered.
- A member with a draft continues from it; a draft never makes a group fail.

Everything here happens in the event loop's thread and never waits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from rollmesh.buffer.client.client import Lease
from rollmesh.generators.engines.types import EngineStatus, GenerationResult
from rollmesh.generators.rollout.active_group import ActiveGroup, FinishedMember
from rollmesh.generators.rollout.capacity import Capacity
from rollmesh.generators.rollout.response_source import MemberRequest, ResponseSource, failure_of
from rollmesh.generators.weights.pinned_groups import PinnedGroups
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2

log = logging.getLogger(__name__)
PARTIAL_AFTER_S = 2.0

# Groups with the members that are ready to be scored.
Batch = list[tuple[ActiveGroup, list[FinishedMember]]]


@dataclass(frozen=True, slots=True)
class RolloutHandlers:
    """The receivers of groups that leave the rollout loop.

    Attributes:
        on_batch: scores and stores finished members; reports back through `on_stored`.
        on_failed: stores members that could not even be started, with the reason.
        on_release: gives groups back to the buffer; reports back through `on_released`.
        on_load: called when the load has changed (credits may be due).
        whole_groups: true if a group's members have to be scored together.
    """

    on_batch: Callable[[Batch], None]
    on_failed: Callable[[ActiveGroup, list[int], str], None]
    on_release: Callable[[list[ActiveGroup]], None]
    on_load: Callable[[], None]
    whole_groups: Callable[[], bool] = lambda: False


class RolloutManager:
    """The groups in progress. `connect` comes before the first grant.

    Args:
        source: makes the responses.
        capacity: counts the members, and bounds the groups.
        pinned: groups that need the weights in service.
        episodes: responses are episodes of several turns.

    Attributes:
        capacity: see above.
        idle: set while no group is in progress; `busy` is its opposite.
        cancelled: groups that the buffer cancelled here.
        taken_over: tokens that came with grants and were not sampled again.
    """

    def __init__(
        self,
        source: ResponseSource,
        capacity: Capacity,
        pinned: PinnedGroups,
        *,
        episodes: bool = False,
    ) -> None:
        self._source = source
        self.capacity = capacity
        self._episodes = episodes
        self._handlers: RolloutHandlers
        self._groups: dict[tuple[str, str], ActiveGroup] = {}
        self._releasing: set[ActiveGroup] = set()
        self._requests: dict[str, tuple[ActiveGroup, int]] = {}
        self._ids = itertools.count()
        self._starting: list[ActiveGroup] = []
        self._pinned = pinned
        self.idle = asyncio.Event()
        self.idle.set()
        self.busy = asyncio.Event()
        self.cancelled = 0
        self.taken_over = 0

    def connect(self, handlers: RolloutHandlers) -> None:
        """Sets the callbacks for groups that leave."""
        self._handlers = handlers

    @property
    def active_groups(self) -> int:
        """Number of groups in progress."""
        return len(self._groups)

    def leases(self, table: str) -> list[Lease]:
        """The leases of the groups of `table` that are held, and of those that are being released.

        The latter would be lost, instead of released, if they were not named.
        """
        return [group.key for group in (*self._groups.values(), *self._releasing) if group.table == table]

    def observe(self, status: EngineStatus, at: float) -> None:
        """Adapts the capacity to the engine's load.

        Args:
            at: time of the status, in seconds of a monotonic clock.
        """
        # After pinned groups, while a swap waits, requests do not wait for room.
        if not self._pinned.active and self.capacity.observe(status, at):
            self._handlers.on_load()

    # -------------------------------------------------------------------------------------------------- grants

    def add(self, table: str, grant: buffer_pb2.GroupGrant) -> None:
        """Takes a group on; one that is held already under the same lease is ignored.

        Grants are repeated when a stream is opened again.
        """
        earlier = self._groups.get((table, grant.group_id))
        if earlier is not None:
            if earlier.grant.lease_id == grant.lease_id:
                return
            self.drop(earlier)
        self.capacity.set_group_size(table, grant.task.n)
        group = ActiveGroup.from_grant(table, grant)
        self._groups[(table, grant.group_id)] = group
        self.idle.clear()
        self.busy.set()
        if group.pinned is not None:
            self._pinned.begin(group)
        if not self._starting:
            asyncio.get_running_loop().call_soon(self._start)
        self._starting.append(group)

    def _start(self) -> None:
        """Submits the groups that came together in one submission."""
        groups, self._starting = self._starting, []
        requests: list[MemberRequest] = []
        misplaced = []
        serving = self._source.status().serving
        for group in groups:
            if group.dropped:
                continue
            wrong_version = group.pinned is not None and group.pinned != serving
            if self.capacity.closed or wrong_version or not group.missing_members():
                misplaced.append(group)
                continue
            try:
                requests.extend(self._requests_of(group))
            except PayloadError as error:
                self._fail(group, error)
        self.release(misplaced)
        self._submit(requests)
        self._handlers.on_load()

    def _requests_of(self, group: ActiveGroup) -> list[MemberRequest]:
        group.begun_ns = time.time_ns()
        requests = []
        for member in group.missing_members():
            request = group.request(member, str(next(self._ids)))
            group.generating[member] = request.request_id
            self.capacity.add_generating(group.table, 1)
            self._requests[request.request_id] = (group, member)
            self.taken_over += group.draft_tokens(member)
            requests.append(request)
        return requests

    def _submit(self, requests: list[MemberRequest]) -> None:
        if not requests:
            return
        try:
            self._source.submit(requests)
        except PayloadError as error:
            if len({self._requests[request.request_id][0].group_id for request in requests}) == 1:
                self._restart_without_draft(self._requests[requests[0].request_id][0], requests, error)
                return
            # All are taken or none: find the group that it refuses.
            by_group: dict[str, list[MemberRequest]] = {}
            for request in requests:
                by_group.setdefault(self._requests[request.request_id][0].group_id, []).append(request)
            for part in by_group.values():
                self._submit(part)
        else:
            if self._episodes and any(request.pinned for request in requests):
                self._pinned.hold_swap()

    def _restart_without_draft(self, group: ActiveGroup, requests: list[MemberRequest], error: PayloadError) -> None:
        if not group.prefixes:
            self._fail(group, error)
            return
        log.warning("group %s starts again: %s", group.group_id, error, extra={"group": group.group_id})
        self.taken_over -= sum(group.draft_tokens(member) for member in group.generating)
        group.prefixes.clear()
        self._submit([replace(request, prefix=None) for request in requests])

    def _fail(self, group: ActiveGroup, error: PayloadError) -> None:
        """Fails a group with a prompt that cannot be answered: every missing member ends with an error outcome."""
        log.warning("group %s cannot be generated: %s", group.group_id, error, extra={"group": group.group_id})
        self._forget_requests(group)
        members = group.missing_members()
        self._count_undelivered(group, len(members))
        self._handlers.on_failed(group, members, f"generation refused: {error}")

    # ------------------------------------------------------------------------------------------------- results

    def unfinished(self, table: str) -> dict[str, tuple[ActiveGroup, int]]:
        """Request id -> (group, member) of the unfinished members."""
        return {name: owner for name, owner in self._requests.items() if owner[0].table == table}

    def on_results(self, results: Sequence[GenerationResult]) -> None:
        """Accepts the results of one decode step."""
        now = time.time_ns()
        complete: dict[int, ActiveGroup] = {}
        misplaced: list[ActiveGroup] = []
        for result in results:
            owner = self._requests.pop(result.request_id, None)
            if owner is None:
                continue
            group, member = owner
            del group.generating[member]
            self.capacity.add_generating(group.table, -1)
            if (result.finish_reason == "aborted" and not result.refusal) or not _is_from_version(group.pinned, result):
                misplaced.append(group)
                continue
            if not group.finished and group.generating:
                asyncio.get_running_loop().call_later(PARTIAL_AFTER_S, self._submit_part, group)
            group.finished.append(FinishedMember(member, result, now))
            failure = failure_of(result)
            if not failure:
                group.answered = True
                self.capacity.record_answer()
            if not group.generating:
                self._pinned.end(group)
                self._record_outcome(group, failure)
                complete[id(group)] = group
        self._end_sampling(misplaced)
        batch = [
            (group, self._pop_finished(group)) for group in complete.values() if group.finished and not group.dropped
        ]
        if batch:
            self._handlers.on_batch(batch)
        self._handlers.on_load()

    def _record_outcome(self, group: ActiveGroup, failure: str) -> None:
        """Records a group of which no member was answered; after several of them fewer are requested."""
        if group.answered:
            return
        if pause := self.capacity.record_failure(failure):
            log.warning("no member of group %s was answered; the next is requested in %.0f s", group.group_id, pause)
            asyncio.get_running_loop().call_later(pause, self._handlers.on_load)

    def _pop_finished(self, group: ActiveGroup) -> list[FinishedMember]:
        finished, group.finished = group.finished, []
        self._count_undelivered(group, len(finished))
        return finished

    def _count_undelivered(self, group: ActiveGroup, members: int) -> None:
        group.undelivered += members
        self.capacity.add_undelivered(members)

    def _submit_part(self, group: ActiveGroup) -> None:
        """Submits the finished members of a group after the first has waited long enough for the rest."""
        if group.finished and not group.dropped and not self._handlers.whole_groups():
            self._handlers.on_batch([(group, self._pop_finished(group))])

    def on_stored(self, group: ActiveGroup, members: int) -> None:
        """Records that the outcome of `members` submitted members is stored, or not needed any more."""
        self._count_undelivered(group, -members)
        if group.is_done and not group.dropped:
            if group.incomplete:
                self.release([group])
            else:
                self._forget(group)
        self._handlers.on_load()

    # ------------------------------------------------------------------------------------------- drop and release

    def drop(self, group: ActiveGroup) -> None:
        """Stops working on a group that has another holder, or has ended."""
        if group.dropped:
            return
        group.dropped = True
        group.finished.clear()
        self._forget_requests(group, abort=True)
        self._forget(group)

    def cancel(self, table: str, leases: Iterable[buffer_pb2.LeaseRef]) -> None:
        """Drops groups that are not needed any more; leases that are not held (any more) are ignored."""
        for lease in leases:
            group = self._groups.get((table, lease.group_id))
            if group is not None and group.grant.lease_id == lease.lease_id:
                self.cancelled += 1
                self.drop(group)
        self._handlers.on_load()

    def _end_sampling(self, groups: Iterable[ActiveGroup]) -> None:
        """Ends the sampling of groups; each is released once its finished members are stored."""
        for group in groups:
            if group.dropped or group.incomplete:
                continue
            group.incomplete = True
            self._forget_requests(group, abort=True)
            if group.finished:
                self._handlers.on_batch([(group, self._pop_finished(group))])
            if group.is_done:
                self.release([group])

    def release(self, groups: Sequence[ActiveGroup]) -> None:
        """Releases groups to the buffer; members stored so far stay."""
        if not groups:
            return
        for group in groups:
            self.drop(group)
        self._releasing.update(groups)
        self._handlers.on_release(list(groups))

    def on_released(self, groups: Iterable[ActiveGroup]) -> None:
        """Records that the buffer knows of the release, or cannot be reached."""
        self._releasing.difference_update(groups)

    def fail_request(self, request_id: str, reason: str) -> None:
        """Fails the missing members of a group: the engine has ended at one of its requests."""
        owner = self._requests.get(request_id)
        if owner is not None:
            group, _ = owner
            members = sorted(group.generating)
            self._forget_requests(group)
            self._count_undelivered(group, len(members))
            self._handlers.on_failed(group, members, reason)

    def stop_admitting(self) -> None:
        """Asks for no more groups; those that come nevertheless are released."""
        self.capacity.closed = True
        self._handlers.on_load()

    def set_asleep(self, asleep: bool) -> None:  # a state, not an option
        """Asks for no groups while asleep; those that come nevertheless are held."""
        self.capacity.asleep = asleep
        self._handlers.on_load()

    def release_pinned(self) -> None:
        """Releases the groups that only the weights in service could answer, once their finished members are stored."""
        self._end_sampling([group for group in self._groups.values() if group.pinned is not None])

    def release_unfinished(self) -> None:
        """Releases the groups that still have members to be sampled, once their finished members are stored."""
        self._end_sampling([group for group in self._groups.values() if group.generating or group in self._starting])

    def flush_finished(self) -> None:
        """Submits finished members without waiting for the rest of their groups."""
        batch = [(group, self._pop_finished(group)) for group in self._groups.values() if group.finished]
        if batch:
            self._handlers.on_batch(batch)

    def release_all(self) -> None:
        """Releases every group that still has members to be sampled."""
        self.release([group for group in self._groups.values() if group.generating or group in self._starting])

    def _forget_requests(self, group: ActiveGroup, *, abort: bool = False) -> None:
        ids = list(group.generating.values())
        for request_id in ids:
            self._requests.pop(request_id, None)
        self.capacity.add_generating(group.table, -len(ids))
        group.generating.clear()
        self._pinned.end(group)
        if abort and ids:
            self._source.abort(ids)

    def _forget(self, group: ActiveGroup) -> None:
        if self._groups.get((group.table, group.group_id)) is group:
            del self._groups[(group.table, group.group_id)]
        if not self._groups:
            self.idle.set()
            self.busy.clear()


def _is_from_version(pinned: PolicyVersion | None, result: GenerationResult) -> bool:
    """True where a response comes from the version that it has to."""
    return pinned is None or all(version == pinned for _, version in result.sampled.versions.runs)
