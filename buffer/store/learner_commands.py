"""Commands of the learner: prompt tasks go in, groups come out and are claimed and committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from rollmesh.buffer.policy.batch_selection import BatchCandidates, Candidate, GroupFacts
from rollmesh.buffer.protocol.leases import LEARNER, Lease
from rollmesh.buffer.protocol.limits import MAX_REASONS
from rollmesh.buffer.store.commands import MAX_GROUPS_PER_CALL, CommandRunner, lease_arguments
from rollmesh.buffer.store.errors import checked_answer
from rollmesh.buffer.store.payloads import digest_of
from rollmesh.buffer.store.records import Leased, facts_from_reply, leased_from_reply
from rollmesh.mesh.errors import FencedError
from rollmesh.mesh.tables import EVAL, TRAIN
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import trajectory_pb2 as trajectory


class LearnerCommands(CommandRunner):
    """Commands of the learner."""

    async def seed(
        self,
        table: str,
        incarnation: int,
        tasks: Sequence[trajectory.PromptTask],
        *,
        end_of_data: bool,
        withdraw: bool,
        call: int,
        reserves: Sequence[int],
    ) -> tuple[int, int, int, int]:
        """Adds tasks; returns (added, seeded, pending, withdrawn). `reserves`: the bytes that their groups may need.

        A prompt is stored before its task counts, under a name that holds the digest of its bytes. So a prompt that is
        stored for a refused task takes no other prompt's place, and is swept. Its images lie in files.
        """
        present = await self._run("read_table", table)
        if self.snapshots[table].incarnation > incarnation:
            raise FencedError()
        commands: list[tuple[str | bytes, ...]] = []
        arguments: list[str | bytes | int] = []
        for task, reserve in zip(tasks, reserves, strict=True):
            blob = (await self.images.take_out(task)).SerializeToString()
            digest = digest_of(blob)
            if task.ordinal > present[2]:
                name = f"{task.ordinal}:{digest}"
                self._cache_prompt(table, name, blob)
                commands.append(("SET", self.keys.prompt(table, name), blob))
            pin = str(PolicyVersion.from_proto(task.pinned)) if task.HasField("pinned") else ""
            entry = msgpack.packb([task.ordinal, task.n, pin, reserve, task.task_id, "", 0])
            arguments += [task.ordinal, entry, pin, digest]
        answer = await self.redis.run_after(
            commands, "seed", table, incarnation, int(end_of_data), int(withdraw), call, *arguments
        )
        self._update_snapshot(table, answer[1])
        added, seeded, pending, withdrawn = checked_answer(answer)[2:6]
        return added, seeded, pending, withdrawn

    async def attach_learner(self, table: str, incarnation: int, token: str) -> list[Leased]:
        """Opens the learner's stream (again); returns the groups that are leased to it."""
        answer = await self._run("attach", table, LEARNER, incarnation, token)
        return [leased_from_reply(item) for item in answer[2]]

    async def list_candidates(self, table: str, version: int, count: int) -> BatchCandidates:
        answer = await self._run("list_candidates", table, version, count)
        candidates = tuple(Candidate(gid.decode(), deadline, float(order)) for gid, deadline, order in answer[2])
        return BatchCandidates(candidates, tuple(answer[3]), int(answer[4]), int(answer[5]))

    async def sample(
        self, table: str, incarnation: int, version: int, group_ids: Sequence[str], token: str
    ) -> list[Leased]:
        answer = await self._run("sample", table, incarnation, version, token, *group_ids)
        return [leased_from_reply(item) for item in answer[2]]

    async def group_facts(self, table: str, group_ids: Sequence[str]) -> list[GroupFacts]:
        """Facts of groups for a score; groups that have ended are left out."""
        answer = await self._run("group_facts", table, *group_ids)
        return [facts_from_reply(item) for item in answer[2]]

    async def set_priorities(
        self, table: str, incarnation: int, call: int, priorities: Sequence[tuple[str, float, int]]
    ) -> int:
        """Changes (group id, priority, weight); returns the number of groups changed."""
        arguments = [part for gid, priority, weight in priorities for part in (gid, repr(priority), weight)]
        answer = await self._run("set_priorities", table, incarnation, call, *arguments)
        return int(answer[2])

    async def claim(
        self, table: str, incarnation: int, train_version: int, leases: Sequence[Lease]
    ) -> tuple[bool, list[tuple[Lease, str]], bool]:
        """Claims leases: (claimed, refused leases with the reason, whether a checkpoint is wanted)."""
        answer = await self._run("claim", table, incarnation, train_version, *lease_arguments(leases))
        refused = [(Lease(gid.decode(), lease.decode()), reason.decode()) for gid, reason, lease in answer[3]]
        return bool(answer[2]), refused, bool(answer[2] and answer[4])

    async def commit(self, table: str, incarnation: int, version: int, checkpoint: str) -> int:
        """Marks uses below `version` as durable; returns the number of groups that became trained."""
        trained, left = 0, 1
        while left:
            answer = await self._run("commit", table, incarnation, version, checkpoint, MAX_GROUPS_PER_CALL)
            trained, left = trained + answer[2], answer[3]
        return trained

    async def resume(
        self, table: str, member_id: str, version: int, *, takeover: bool, force: bool, lease_ms: int, call: int
    ) -> list[Any]:
        """Takes the run over; returns the script's answer, since only the caller can explain a refusal."""
        answer = await self.redis.run_script(
            "resume", table, member_id, version, int(takeover), int(force), lease_ms, call
        )
        self._update_snapshot(table, answer[1])
        return answer

    async def reassert(
        self,
        table: str,
        incarnation: int,
        member_id: str,
        version: int,
        *,
        lease_ms: int,
        more: bool,
        takeovers: Sequence[tuple[int, int]],
        uses: Sequence[tuple[str, int, int]],
        doubt: int,
    ) -> tuple[int, int, int]:
        """Applies uses (group id, train version, ordinal), oldest first: (corrected, unknown, doubt in force)."""
        answer = await self._run(
            "reassert", table, incarnation, member_id, version, lease_ms, int(more), doubt, len(takeovers),
            *(part for pair in takeovers for part in pair), *(part for use in uses for part in use),
        )  # fmt: skip
        return int(answer[2]), int(answer[3]), int(answer[4])

    async def nack(self, table: str, incarnation: int, leases: Sequence[Lease], disposition: str, reason: str) -> int:
        answer = await self._run("nack", table, incarnation, disposition, reason, MAX_REASONS, *lease_arguments(leases))
        return int(answer[2])

    async def set_policy(self, incarnation: int, version: int) -> int:
        answer = await self.redis.run_script("set_policy", "", incarnation, version)
        checked_answer(answer)
        self._update_snapshot(TRAIN, answer[1])
        await self.refresh(EVAL)
        return int(answer[2])
