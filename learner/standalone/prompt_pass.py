"""One pass over prompts at one version: seeded ahead of the generators, collected, stored, ended.

Invariants: a group is ended only after its responses are durable. The buffer holds a bounded number of tasks, and this
process a bounded number of groups, however many prompts there are. A pass that makes no progress ends with a named
error.

All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.buffer.client.client import BufferClient, ReceivedGroup, SampleStream
from rollmesh.learner.data.prompts import PromptEncoder, RefusedRow, TaskShape
from rollmesh.learner.data.records import RowSource
from rollmesh.learner.data.rows import Row
from rollmesh.learner.evaluation.eval_table import EvalTable
from rollmesh.learner.evaluation.result import Decode, prompt_record, unscored_text
from rollmesh.learner.rollouts.group_stream import fetch_unsent
from rollmesh.learner.standalone.response_file import ResponseFile
from rollmesh.mesh.errors import StalledError
from rollmesh.mesh.tables import EVAL
from rollmesh.mesh.trajectory import payload_codec
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import trajectory_pb2

log = logging.getLogger(__name__)
# Tasks seeded at a time: more than all generators of a large mesh take before the next look.
_AHEAD = 2048
# Groups on their way here.
_CREDITS = 64
# Seconds between two looks at the table.
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class PassRules:
    """Settings of a pass.

    Attributes:
        policy: the version that answers.
        shape: of the tasks.
        stall_limit_s: seconds without progress after which the pass ends with an error; 0: no limit.
        with_log_probs: token ids and log-probs of the responses are stored too.
    """

    policy: PolicyVersion
    shape: TaskShape
    stall_limit_s: float
    with_log_probs: bool = False


class PromptPass:
    """The pass over one dataset.

    Args:
        client: of the buffer.
        source: the prompts.
        wanted: numbers of their rows, in the order in which they are asked.
        encoder: makes tasks of them.
        decode: token ids to text.
        file: takes the responses.
        rules: see there.
    """

    def __init__(
        self,
        client: BufferClient,
        source: RowSource[Row],
        wanted: Sequence[int],
        encoder: PromptEncoder,
        decode: Decode,
        file: ResponseFile,
        rules: PassRules,
    ) -> None:
        self._client = client
        self._table = EvalTable(client, rules.policy.incarnation)
        self._source = source
        self._wanted = wanted
        self._encoder = encoder
        self._decode = decode
        self._file = file
        self._rules = rules
        self._seeded = 0
        self._held: dict[str, ReceivedGroup] = {}

    async def run(self) -> None:
        """Asks every prompt once; those whose responses all failed are left out of the file.

        Raises:
            FencedError: another learner has taken over.
            StalledError: nothing came for too long.
            DataError: a prompt cannot be read, or the file cannot be written.
        """
        stream = self._client.sample(EVAL, self._rules.policy.incarnation)
        stream.holdings = lambda: [group.lease for group in self._held.values()]
        loop = asyncio.get_running_loop()
        moved_at, before, looked_at = loop.time(), (0, 0), float("-inf")
        try:
            while True:
                if loop.time() - looked_at >= _LOOK_S:
                    looked_at, moved = loop.time(), await self._look()
                    if moved != before:
                        moved_at, before = loop.time(), moved
                exhausted = await self._take(stream)
                if exhausted and self._seeded == len(self._wanted):
                    return
                self._refuse_standstill(loop.time() - moved_at, stream.waiting_reason)
        finally:
            await stream.close()

    async def _look(self) -> tuple[int, int]:
        """Seeds further tasks where few are left; returns numbers that change with every progress."""
        counts = (await self._client.describe(EVAL)).counts
        if counts.pending <= _AHEAD // 2 and self._seeded < len(self._wanted):
            await self._seed()
        return counts.admitted, len(self._file.rows)

    async def _seed(self) -> None:
        rows = self._wanted[self._seeded : self._seeded + _AHEAD]
        encoded = await asyncio.to_thread(self._encode, rows)
        refused = [_refusal(row, item) for row, item in zip(rows, encoded, strict=True) if isinstance(item, RefusedRow)]
        if refused:
            log.warning("%d prompts are left out: empty or too long", len(refused))
            await asyncio.to_thread(self._file.append, refused)
        tasks = [item for item in encoded if not isinstance(item, RefusedRow)]
        end = self._seeded + len(rows) == len(self._wanted)
        await self._table.seed(self._rules.policy, tasks, end_of_data=end, withdraw_pending=self._seeded == 0)
        self._seeded += len(rows)

    def _encode(self, rows: Sequence[int]) -> list[trajectory_pb2.PromptTask | RefusedRow]:
        return [
            self._encoder.encode(row, self._rules.shape, number=number, task_id=str(number), ordinal=0)
            for number, row in zip(rows, self._source.rows(rows), strict=True)
        ]

    async def _take(self, stream: SampleStream) -> bool:
        """Stores and ends what comes within a moment; True where nothing more will come."""
        version = self._rules.policy.version
        if (unasked := _CREDITS - stream.outstanding(version)) > _CREDITS // 2:
            stream.request(unasked, version)
        update = await stream.next(_LOOK_S)
        if update is None:
            return False
        for lost in update.lost:
            if lost.group_id in self._held and self._held[lost.group_id].lease == (lost.group_id, lost.lease_id):
                del self._held[lost.group_id]
        self._held.update((group.leased.group_id, group) for group in update.groups)
        held = list(self._held.values())
        if held:
            fetched = [await fetch_unsent(self._client, EVAL, group.leased) for group in held]
            await asyncio.to_thread(self._store, held, fetched)
            await self._table.commit(self._rules.policy, [group.leased for group in held])
            for group in held:
                self._held.pop(group.leased.group_id, None)
        return update.exhausted

    def _store(self, groups: Sequence[ReceivedGroup], fetched: Sequence[Mapping[int, bytes]]) -> None:
        self._file.append([self._record(*both) for both in zip(groups, fetched, strict=True)])

    def _record(self, group: ReceivedGroup, fetched: Mapping[int, bytes]) -> dict[str, Any]:
        """A prompt as it is stored; `fetched` are payloads, by member, that were too large to come along."""
        leased, payloads = group
        whole = [fetched.get(meta.member, data) for meta, data in zip(leased.members, payloads, strict=True)]
        found = [payload_codec.decode(data) if len(data) else None for data in whole]
        texts = [
            unscored_text(meta, self._decode) if one is None else self._decode(one.response_ids.tolist())
            for meta, one in zip(leased.members, found, strict=True)
        ]
        record = prompt_record(leased, texts)
        record["prompt_tokens"] = len(leased.task.prompt_ids) // 4
        if self._rules.with_log_probs:
            for response, one in zip(record["responses"], found, strict=True):
                response["token_ids"] = [] if one is None else one.response_ids.tolist()
                response["log_probs"] = [] if one is None else [round(float(value), 6) for value in one.log_probs]
        return record

    def _refuse_standstill(self, seconds: float, reason: str) -> None:
        limit_s = self._rules.stall_limit_s
        if limit_s and seconds > limit_s:
            raise StalledError(
                f"no prompt was begun or answered for {seconds:.0f} s: {reason or 'no reason is known'}",
                hint="`rollmesh status` and the generators' logs say more; buffer.stall_limit_s is the limit",
            )


def _refusal(row: int, refused: RefusedRow) -> dict[str, Any]:
    return {"row": row, "refused": refused.reason, "prompt_tokens": refused.tokens, "responses": []}
