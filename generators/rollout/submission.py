"""Finished members: scored, packed, stored.

Invariants:

- Every submitted member ends with an outcome acknowledged by the buffer, or with the answer that it is not needed any
  more. Nothing is written of a group that has been dropped.
- A missing score is an error outcome, never a number. An episode that failed is an error, whatever it sampled.
- While the buffer is away finished work is kept; when it stays away `on_error` is called.
- Side data is in the buffer before the member that names it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollmesh.buffer.client.client import PendingWrite, WriteResult
from rollmesh.generators.rollout.active_group import ActiveGroup, FinishedMember
from rollmesh.generators.rollout.encoding import FINISH_REASONS, member_write
from rollmesh.generators.rollout.member_spans import MemberSpans, Writes
from rollmesh.generators.rollout.response_source import EpisodeResult, failure_of
from rollmesh.generators.rollout.rollout_manager import Batch
from rollmesh.generators.rollout.score_items import ResponseText, ScoredMember, scored_members
from rollmesh.mesh.errors import RollmeshError, UnreachableError
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks
from rollmesh.mesh.runtime.task_group import run_together
from rollmesh.mesh.tables import EVAL
from rollmesh.mesh.telemetry.tracing import no_traces
from rollmesh.mesh.text import EVIDENCE_CHARACTERS, REASON_CHARACTERS, bounded
from rollmesh.mesh.trajectory import reward_record
from rollmesh.mesh.trajectory.payload_codec import Trajectory, encode
from rollmesh.mesh.trajectory.reward_record import RewardRecord
from rollmesh.mesh.trajectory.routing import PROMPT_EXPERTS, ROUTED_EXPERTS, split_prompt
from rollmesh.protos import buffer_pb2, reward_pb2, trajectory_pb2
from rollmesh.reward_service.client.client import RewardScorer, is_pending
from rollmesh.reward_service.client.token_rewards import token_rewards

log = logging.getLogger(__name__)
# Tokens of a response without a score that are kept, for the search of the cause: its metadata stay small.
_UNSCORED_IDS = 1500
# Seconds before a server that promises a reward is asked again, at least.
_LEAST_PAUSE_S = 0.05
# Pieces of side data on their way at once.
_UPLOADS = 8
Side = Sequence[tuple[str, bytes | NDArray[np.generic]]]


class MemberWriter(Protocol):
    """The part of the buffer's client that stores members."""

    async def write(self, writes: Sequence[PendingWrite]) -> list[WriteResult]:
        """Stores members; one result each, in order.

        Raises:
            UnreachableError: the buffer stayed away for too long.
        """
        ...


class MemberStore(Protocol):
    """The store of members."""

    def writer(self, table: str) -> MemberWriter:
        """The writer of a table."""
        ...

    async def upload_side(
        self, table: str, grant: buffer_pb2.GroupGrant, member: int, name: str, data: bytes | NDArray[np.generic]
    ) -> trajectory_pb2.SideData:
        """Stores an array, or bytes, that belong to a member.

        Raises:
            UnreachableError: the buffer stayed away for too long.
            RollmeshError: it does not take the data.
        """
        ...


class GroupOwner(Protocol):
    """The part of the rollout loop that receives the outcome of members."""

    def on_stored(self, group: ActiveGroup, members: int) -> None:
        """Records that `members` members of a group need no more work."""
        ...

    def drop(self, group: ActiveGroup) -> None:
        """Stops working on a group that has another holder, or has ended."""
        ...


class TrajectorySubmitter:
    """Brings finished members to the buffer.

    Args:
        generator_id: this generator's member id in the mesh.
        run: name of the run.
        text: decodes responses for the rewards.
        scorer: scores.
        store: stores members and their side data.
        owner: receives their outcome.
        on_error: called when delivery cannot continue (the buffer stayed away).
        encode: makes payloads of finished responses.
        spans: reports traces.
        late_s: seconds after which a reward that was promised for later is an error; the service ends it before.

    Attributes:
        scored, unscorable, failed: members by outcome.
        superseded: members that were not needed any more.
    """

    def __init__(
        self,
        *,
        generator_id: str,
        run: str,
        text: ResponseText,
        scorer: RewardScorer,
        store: MemberStore,
        owner: GroupOwner,
        on_error: Callable[[RollmeshError], None],
        encode: Callable[[Trajectory], bytes] = encode,
        spans: MemberSpans | None = None,
        late_s: float = math.inf,
    ) -> None:
        self._generator_id = generator_id
        self._run = run
        self._text = text
        self._scorer = scorer
        self._member_store = store
        self._owner = owner
        self._on_error = on_error
        self._encode = encode
        self._spans = spans or MemberSpans(no_traces())
        self._late_s = late_s
        self._tasks = BackgroundTasks(self._on_task_error)
        # Members that wait for their reward, and since when, by batch.
        self._waiting: dict[int, tuple[int, float]] = {}
        self._uploading = asyncio.Semaphore(_UPLOADS)
        self.scored = 0
        self.unscorable = 0
        self.failed = 0
        self.superseded = 0

    def waiting_for_rewards(self) -> tuple[int, float]:
        """Number of members without their reward, and the seconds for which the first of them has waited."""
        if not self._waiting:
            return 0, 0.0
        return (
            sum(members for members, _ in self._waiting.values()),
            time.monotonic() - min(since for _, since in self._waiting.values()),
        )

    def submit(self, batch: Batch) -> None:
        """Scores and stores members, in the background."""
        self._tasks.spawn(self._score_and_store(batch))

    def fail(self, group: ActiveGroup, members: Sequence[int], reason: str) -> None:
        """Stores members that could not be generated as errors, in the background."""
        self.failed += len(members)
        for member in members:
            self._spans.failed(group, member, reason)
        self._tasks.spawn(self._store([(group, self._write_of_failure(group, member, reason)) for member in members]))

    async def drained(self) -> None:
        """Waits until nothing is under way."""
        while len(self._tasks):
            await self._tasks.drain()

    async def close(self) -> None:
        """Cancels work that is under way."""
        await self._tasks.close()

    def _on_task_error(self, _name: str, error: BaseException) -> None:
        if isinstance(error, RollmeshError):
            self._on_error(error)
        else:
            log.error("delivery failed", exc_info=error)
            self._on_error(RollmeshError(f"delivery failed: {type(error).__name__}: {error}"))

    # ------------------------------------------------------------------------------------------------- scoring

    async def _score_and_store(self, batch: Batch) -> None:
        members = []
        for group, part in batch:
            reasons = []
            for finished in part:
                if reason := failure_of(finished.result):
                    reasons.append(reason)
                    self.fail(group, [finished.member], reason)
                else:
                    members.append((group, finished))
            _log_once(group, "have no response", reasons)
        if not members:
            return
        # Long responses take seconds to decode, in which leases have to be renewed.
        asked = await asyncio.to_thread(scored_members, self._run, members, self._text)
        await self._ask(asked, time.monotonic(), time.time_ns())

    async def _ask(self, asked: Sequence[ScoredMember], since: float, asked_ns: int) -> None:
        """Scores members and stores them; those whose reward comes later are asked again, and hold up no others."""
        self._waiting[id(asked)] = (len(asked), since)
        try:
            results = await self._scorer.score([member.item for member in asked], details=asked)
        finally:
            del self._waiting[id(asked)]
        overdue = time.monotonic() - since > self._late_s
        results = [_overdue(result) if overdue and is_pending(result) else result for result in results]
        pauses = {place: result.error.retry_after_ms for place, result in enumerate(results) if is_pending(result)}
        if pauses:
            later = [asked[place] for place in pauses]
            pause_s = max(_LEAST_PAUSE_S, min(pauses.values()) / 1000)
            self._waiting[id(later)] = (len(later), since)
            self._tasks.spawn(self._ask_later(later, pause_s, since, asked_ns))
        there = [place for place in range(len(asked)) if place not in pauses]
        await self._store_scored([asked[place] for place in there], [results[place] for place in there], asked_ns)

    async def _ask_later(self, asked: Sequence[ScoredMember], pause_s: float, since: float, asked_ns: int) -> None:
        try:
            await asyncio.sleep(pause_s)
        finally:
            del self._waiting[id(asked)]
        dropped = [member for member in asked if member.group.dropped]
        for member in dropped:
            self.superseded += 1
            self._owner.on_stored(member.group, 1)
        if wanted := [member for member in asked if not member.group.dropped]:
            await self._ask(wanted, since, asked_ns)

    async def _store_scored(
        self, asked: Sequence[ScoredMember], results: Sequence[reward_pb2.ScoreResult], asked_ns: int
    ) -> None:
        pairs = list(zip(asked, results, strict=True))
        # Where tokens end takes a while to find.
        spanned = any(result.scored.spans for result in results)
        rewards = await asyncio.to_thread(_token_rewards, pairs) if spanned else _token_rewards(pairs)
        writes: Writes = []
        uploads = []
        unscored: dict[ActiveGroup, list[str]] = {}
        for (member, result), own in zip(pairs, rewards, strict=True):
            group, finished = member.group, member.finished
            if group.dropped:
                self.superseded += 1
                self._owner.on_stored(group, 1)
                continue
            write = self._write_of(member, result, own)
            self._spans.scored(group, finished, write.head.meta, asked_ns)
            if write.head.meta.outcome == trajectory_pb2.OUTCOME_ERROR:
                unscored.setdefault(group, []).append(write.head.meta.reason)
            if write.head.meta.outcome == trajectory_pb2.OUTCOME_SCORED:
                scored = result.scored
                # Servers of others may send any amount.
                evidence = bounded(scored.evidence, EVIDENCE_CHARACTERS)
                record = RewardRecord(evidence, scored.cost, scored.cached, self._scorer.scorers)
                if side := _side_of(group, finished, record):
                    uploads.append(self._upload(group, finished, write.head.meta, side))
            writes.append((group, write))
        for group, reasons in unscored.items():
            _log_once(group, "could not be scored", reasons)
        await run_together(*uploads)
        await self._store(writes)

    async def _upload(
        self, group: ActiveGroup, finished: FinishedMember, meta: trajectory_pb2.MemberMeta, side: Side
    ) -> None:
        """Stores a member's side data; what the buffer does not take is left out."""
        for name, data in side:
            try:
                async with self._uploading:
                    entry = await self._member_store.upload_side(group.table, group.grant, finished.member, name, data)
            except UnreachableError:
                raise
            except RollmeshError as error:
                subject = f"{name} of member {finished.member} of group {group.group_id}"
                extra = {"group": group.group_id, "member": finished.member}
                log.warning("%s is left out: %s", subject, error, extra=extra)
                if name == PROMPT_EXPERTS:
                    group.prompt_recorded = False
                continue
            meta.side.append(entry)

    def _write_of(
        self, member: ScoredMember, result: reward_pb2.ScoreResult, rewards: NDArray[np.float32] | None
    ) -> PendingWrite:
        group, finished = member.group, member.finished
        meta = self._meta(group, finished)
        payload = b""
        kind = result.WhichOneof("outcome")
        if kind == "scored":
            self.scored += 1
            meta.outcome = trajectory_pb2.OUTCOME_SCORED
            meta.reward = result.scored.total
            meta.components.update(result.scored.components)
            if result.scored.HasField("answer"):
                meta.answer = bounded(result.scored.answer, REASON_CHARACTERS)
            sampled = finished.result.sampled
            payload = self._encode(sampled if rewards is None else replace(sampled, token_rewards=rewards))
        elif kind == "unscorable":
            self.unscorable += 1
            meta.outcome = trajectory_pb2.OUTCOME_UNSCORABLE
            meta.reason = bounded(result.unscorable.reason, REASON_CHARACTERS) or "unscorable"
        else:
            self.failed += 1
            meta.outcome = trajectory_pb2.OUTCOME_ERROR
            why = f"reward {result.error.code or 'missing'}: {result.error.message}"
            meta.reason = bounded(why, REASON_CHARACTERS)
        if kind != "scored" and group.table == EVAL:
            meta.unscored_ids.extend(finished.result.sampled.response_ids[-_UNSCORED_IDS:].tolist())
        return member_write(group, meta, payload)

    def _meta(self, group: ActiveGroup, finished: FinishedMember) -> trajectory_pb2.MemberMeta:
        result, sampled = finished.result, finished.result.sampled
        return trajectory_pb2.MemberMeta(
            member=finished.member,
            finish_reason=FINISH_REASONS[result.finish_reason],
            prompt_tokens=group.prompt_tokens,
            response_tokens=len(sampled),
            # Written in place: messages of their own would be copied, and cost more than all else here.
            oldest=sampled.versions.oldest._asdict(),
            newest=sampled.versions.newest._asdict(),
            generator=self._generator_id,
            finished_unix_ns=finished.finished_unix_ns,
            metrics=result.stats if isinstance(result, EpisodeResult) else None,
        )

    def _write_of_failure(self, group: ActiveGroup, member: int, reason: str) -> PendingWrite:
        meta = trajectory_pb2.MemberMeta(
            member=member,
            outcome=trajectory_pb2.OUTCOME_ERROR,
            reason=bounded(reason, REASON_CHARACTERS),
            finish_reason=trajectory_pb2.FINISH_REASON_ABORTED,
            prompt_tokens=group.prompt_tokens,
            finished_unix_ns=time.time_ns(),
            generator=self._generator_id,
        )
        return member_write(group, meta, b"")

    # ------------------------------------------------------------------------------------------------- storing

    async def _store(self, writes: Writes) -> None:
        by_table: dict[str, Writes] = {}
        for group, write in writes:
            by_table.setdefault(group.table, []).append((group, write))
        for table, part in by_table.items():
            began_ns = time.time_ns()
            results = await self._member_store.writer(table).write([write for _, write in part])
            self._spans.written(part, results, began_ns)
            self._record_results(part, results)

    def _record_results(self, writes: Writes, results: Sequence[WriteResult]) -> None:
        """Records the results of writes; a rejected member is stored as an error in its place."""
        for (group, write), result in zip(writes, results, strict=True):
            meta = write.head.meta
            if result.status == buffer_pb2.WRITE_STATUS_SUPERSEDED:
                self.superseded += 1
                self._owner.drop(group)
            elif result.status == buffer_pb2.WRITE_STATUS_REJECTED:
                reason = f"rejected by the buffer: {result.field}: {result.message}"
                extra = {"group": group.group_id, "member": meta.member}
                log.error("member %d of group %s was %s", meta.member, group.group_id, reason, extra=extra)
                if meta.outcome != trajectory_pb2.OUTCOME_ERROR:
                    self.fail(group, [meta.member], reason)
                    continue
                self._owner.drop(group)
            self._owner.on_stored(group, 1)


def _token_rewards(
    pairs: Sequence[tuple[ScoredMember, reward_pb2.ScoreResult]],
) -> list[NDArray[np.float32] | None]:
    """Rewards of the tokens of each member; None for those without."""
    return [token_rewards(result.scored, member, member.finished.result.sampled) for member, result in pairs]


def _overdue(promised: reward_pb2.ScoreResult) -> reward_pb2.ScoreResult:
    """The result of a member whose reward was promised, and has not come."""
    message = f"the reward that was promised has not come: {promised.error.message}"
    return reward_pb2.ScoreResult(item_id=promised.item_id, error=reward_pb2.Error(code="late", message=message))


def _log_once(group: ActiveGroup, event: str, reasons: Sequence[str]) -> None:
    """Logs one message for all members of a group that failed together, with the first cause."""
    if reasons:
        extra = {"group": group.group_id}
        log.warning("%d members of group %s %s: %s", len(reasons), group.group_id, event, reasons[0], extra=extra)


def _side_of(group: ActiveGroup, finished: FinishedMember, record: RewardRecord) -> Side:
    """A member's side data as it is stored: rows of the prompt with one member of the group alone."""
    side: list[tuple[str, bytes | NDArray[np.generic]]] = []
    if record:
        side.append((reward_record.NAME, record.to_bytes()))
    for name, array in finished.result.side.items():
        if name != ROUTED_EXPERTS:
            side.append((name, array))
            continue
        prompt, response = split_prompt(array, len(group.prompt_ids))
        if len(response):
            side.append((name, response))
        if not group.prompt_recorded:
            group.prompt_recorded = True
            side.append((PROMPT_EXPERTS, prompt))
    return side
