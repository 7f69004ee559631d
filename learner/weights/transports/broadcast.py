"""Broadcast over gloo or nccl: receivers join a round, and the learner sends every bucket once to all of them.

Invariants:

- Rounds run one after the other in a thread of their own. Nothing here waits in the thread that trains.
- A round's members are those that joined within `window_s`, sooner where all have come that are expected. Expected are
  the members of the round before, and those that came too late for it.
- A group is kept from round to round as long as its members stay the same, and formed again otherwise. Each group has a
  name of its own, with the incarnation in it.
- Every step of a round has a deadline. A failure ends the round for all of its members, which get the version over
  grpc; those that did not come are not expected again.
- A receiver that did not come to a round, or lagged when it stopped, is left out of the next ones. Their number doubles
  each time.
- A receiver that joins while the broadcast of the same version runs is refused at once and fetches from elsewhere. One
  that has left that broadcast and joins again ends it, and is a member of the next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from rollmesh.learner.weights.published_version import PublishedVersion
from rollmesh.learner.weights.transports.interface import SenderTransport
from rollmesh.learner.weights.transports.rendezvous import Rendezvous
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.runtime.devices import require_cuda
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights.broadcast import (
    DEPTH,
    LONGEST_STALL_S,
    BroadcastBackend,
    BroadcastGroup,
    BroadcastRank,
    Staging,
)
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)
# Receivers learn of a version at the same moment; they differ by the swap of the version before.
WINDOW_S = 0.5
# Rounds that a receiver leaves out at most.
_MOST_ROUNDS = 64
# For the threads at the end. A thread that is still in C++ when the interpreter goes would abort the process.
_END_S = LONGEST_STALL_S + 5.0


@dataclass(slots=True)
class _Join:
    """A receiver that asks for a version; `group` is the broadcast group that it still has."""

    member_id: str
    policy: PolicyVersion
    group: str
    answer: Future[weights_pb2.JoinBroadcastResponse] = field(default_factory=Future)


@dataclass(slots=True)
class _Suspension:
    """A receiver that delayed rounds: how often in a row, and the rounds from which it is left out."""

    times: int = 0
    rounds: int = 0


@dataclass(slots=True)
class _Group:
    """The group kept from the last round: the rank of each member."""

    group: BroadcastGroup
    ranks: dict[str, int]


class Broadcast(SenderTransport):
    """Broadcasts versions to those that join.

    Args:
        backend: gloo, or nccl on the learner's CUDA device.
        rendezvous: where members meet.
        timeout_s: `weights.timeout_s`.
        window_s: how long the first that joins waits for others.

    Raises:
        ConfigError: nccl, and there is no CUDA device.
    """

    def __init__(
        self, backend: BroadcastBackend, rendezvous: Rendezvous, *, timeout_s: float, window_s: float = WINDOW_S
    ) -> None:
        self.name = backend
        self._backend = backend
        if backend == "nccl":
            require_cuda("weights.transport", backend, instead="auto")
        # The device of the thread that makes this, which is the one that trains.
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._rendezvous = rendezvous
        self._timeout_s = timeout_s
        self._window_s = window_s
        self._changed = threading.Condition()
        self._versions: dict[PolicyVersion, PublishedVersion] = {}
        self._joins: list[_Join] = []
        self._expected: set[str] = set()
        self._running: tuple[PolicyVersion, set[str]] | None = None
        self._suspended: dict[str, _Suspension] = {}
        self._kept: _Group | None = None
        self._formed = 0
        self._staging: Staging | None = None
        self._aborting: threading.Thread | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"broadcast-{backend}", daemon=True)
        self._thread.start()

    def offer(self, version: PublishedVersion) -> weights_pb2.Offer | None:
        """Lets receivers join a broadcast of the version; see `SenderTransport`."""
        with self._changed:
            self._versions[version.policy] = version
        return weights_pb2.Offer(transport=self.name, address=self._rendezvous.address)

    def retire(self, version: PublishedVersion) -> None:
        """Withdraws the version; a round that has begun continues. See `SenderTransport`."""
        with self._changed:
            self._versions.pop(version.policy, None)

    def close(self) -> None:
        """Ends the round that runs, and the thread."""
        with self._changed:
            self._closed = True
            self._abort_round()
            self._changed.notify()
            breaking = self._aborting
        for thread in (self._thread, breaking):
            if thread is not None:
                thread.join(_END_S)

    def join(self, member_id: str, policy: PolicyVersion, group: str) -> Future[weights_pb2.JoinBroadcastResponse]:
        """Takes a receiver into the next round; its answer comes when the members are settled. Cancel it to leave.

        Args:
            member_id: of the receiver; one that joins again takes the place of its first call.
            policy: the version that it asks for.
            group: the group that it is still connected to; empty: none.

        Raises:
            WeightsError: the version is not kept, or its broadcast has begun without this receiver.
        """
        with self._changed:
            if self._closed or policy not in self._versions:
                raise WeightsError(f"version {policy} is not broadcast any more", hint="fetch the newest instead")
            if self._running is not None and self._running[0] == policy:
                if member_id not in self._running[1]:
                    self._expected.add(member_id)
                    raise WeightsError(f"the broadcast of version {policy} has begun without {member_id}")
                self._running[1].discard(member_id)
                self._abort_round()
            if (suspension := self._suspended.get(member_id)) is not None and suspension.rounds:
                raise WeightsError(
                    f"{member_id} held up the broadcast and is left out for {suspension.rounds} rounds more"
                )
            join = _Join(member_id, policy, group)
            for twin in [other for other in self._joins if other.member_id == member_id]:
                self._joins.remove(twin)
                _refuse(twin, f"{member_id} has joined again")
            self._joins.append(join)
            self._changed.notify()
        return join.answer

    # --------------------------------------------------------------------------------------- the thread of rounds

    def _run(self) -> None:
        while (settled := self._gather_members()) is not None:
            version, members = settled
            try:
                self._round(version, members)
            # torch says RuntimeError where it means memory, streams or devices.
            except (WeightsError, RuntimeError, MemoryError) as error:
                log.warning("version %s goes over grpc to %d receivers: %s", version.policy, len(members), error)
                for join in members:
                    if not join.answer.done():
                        join.answer.set_exception(WeightsError(f"version {version.policy} is not broadcast: {error}"))
                self._release_group()
            else:
                with self._changed:
                    for join in members:
                        self._suspended.pop(join.member_id, None)
            finally:
                with self._changed:
                    self._running = None
        self._release_group()

    def _gather_members(self) -> tuple[PublishedVersion, list[_Join]] | None:
        """Waits for receivers of one version and answers them; None once it is closed."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._joins or self._closed)
                if self._closed:
                    for join in self._joins:
                        _refuse(join, "the learner ends")
                    return None
                deadline = time.monotonic() + self._window_s
                while (left := deadline - time.monotonic()) > 0 and not self._closed:
                    self._joins = [join for join in self._joins if not join.answer.cancelled()]
                    if self._expected and self._expected <= {join.member_id for join in self._joins}:
                        break
                    self._changed.wait(left)
                if self._closed:
                    continue
                # Receivers that ask for an older version, while others ask for a newer one, have been overtaken.
                newest = max((join.policy for join in self._joins), default=None)
                members = []
                for join in self._joins:
                    if join.policy != newest:
                        _refuse(join, f"version {newest} is broadcast")
                    elif join.answer.set_running_or_notify_cancel():
                        members.append(join)
                self._joins = []
                version = self._versions.get(newest) if newest is not None else None
                if version is None:
                    for join in members:
                        join.answer.set_exception(WeightsError(f"version {join.policy} is not broadcast any more"))
                elif members:
                    self._expected = {join.member_id for join in members}
                    self._running = version.policy, set(self._expected)
                    for suspension in self._suspended.values():
                        suspension.rounds = max(0, suspension.rounds - 1)
                    return version, members

    def _group_of(self, policy: PolicyVersion, members: Sequence[_Join]) -> _Group:
        """The group of the last round where it fits, else a new one."""
        kept = self._kept
        if (
            kept is not None
            and {join.member_id for join in members} == kept.ranks.keys()
            and all(join.group == kept.group.name for join in members)
        ):
            return kept
        if kept is not None:
            kept.group.close()
        self._formed += 1
        place = BroadcastRank(rank=0, size=len(members) + 1, host=self._rendezvous.host, device=self._device)
        name = f"{policy.incarnation}-{self._formed}"
        group = BroadcastGroup(self._backend, self._rendezvous.store, name, place, timeout_s=self._timeout_s)
        self._kept = _Group(group, {join.member_id: rank for rank, join in enumerate(members, 1)})
        return self._kept

    def _round(self, version: PublishedVersion, members: Sequence[_Join]) -> None:
        """Sends all buckets.

        Raises:
            WeightsError: a member did not come, left, or stopped.
        """
        found = self._group_of(version.policy, members)
        group, ranks = found.group, found.ranks
        for join in members:
            join.answer.set_result(
                weights_pb2.JoinBroadcastResponse(
                    address=self._rendezvous.address,
                    rank=ranks[join.member_id],
                    world_size=group.size,
                    group=group.name,
                )
            )
        try:
            group.begin_round()
        except WeightsError:
            # One that joins and never comes cannot reach the rendezvous: it would hold up every round.
            missing = set(group.missing_ranks())
            self._suspend({member for member, rank in ranks.items() if rank in missing})
            raise
        try:
            self._send(group, version)
        except WeightsError:
            # Those that got fewer buckets than others; not those that have left, and none where all are level.
            lagging = set(group.lagging_ranks())
            with self._changed:
                present = set(self._running[1]) if self._running is not None else set()
            self._suspend({member for member in present if ranks[member] in lagging})
            raise

    def _send(self, group: BroadcastGroup, version: PublishedVersion) -> None:
        """Each bucket is staged while the one before is sent."""
        lengths = [bucket.nbytes for bucket in version.manifest.buckets]
        if self._staging is None or self._staging.largest < max(lengths):
            self._staging = Staging(group.device, max(lengths))
        staging = self._staging
        under_way: list[torch.distributed.Work] = []
        for index in range(len(lengths)):
            if len(under_way) == DEPTH:
                group.finish_bucket(under_way.pop(0))
            under_way.append(group.start_bucket(staging.copy_in(index, version.bucket(index))))
        for work in under_way:
            group.finish_bucket(work)

    def _suspend(self, members: set[str]) -> None:
        """Leaves members out of the next rounds."""
        with self._changed:
            for member in members:
                suspension = self._suspended.setdefault(member, _Suspension())
                suspension.times += 1
                suspension.rounds = min(2**suspension.times, _MOST_ROUNDS)
            self._expected -= members

    def _abort_round(self) -> None:
        """Ends the running round, in a thread, because nccl is slow to close."""
        if self._kept is not None:
            close = self._kept.group.close
            self._aborting = threading.Thread(target=close, name="broadcast-break-off", daemon=True)
            self._aborting.start()

    def _release_group(self) -> None:
        """Closes the group; its members notice."""
        with self._changed:
            kept, self._kept = self._kept, None
        if kept is not None:
            kept.group.close()


def _refuse(join: _Join, why: str) -> None:
    if join.answer.set_running_or_notify_cancel():
        join.answer.set_exception(WeightsError(f"version {join.policy} is not broadcast: {why}"))
