"""Recovery after Redis has lost acknowledged state: the learner reports again which groups it has used.

Redis was restarted, restored from a snapshot, or emptied. Until the learner has reported (an *assertion*), the buffer
hands out nothing. The report comes from the consumption log, which is on disk before each step that it records.

Invariants: no assertion interrupts a claim and its line in the log, nor the choice of tasks and their seeding
(`with_recovery`). An assertion starts again where Redis is restarted during it. A learner that starts on such a Redis
reports for its predecessor before it takes the run over.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.engines.interface import STATE_NAME
from rollmesh.learner.recovery.consumption_log import LOG_NAME, StepUse, read_log, surviving_uses
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.errors import DataError, LostStateError
from rollmesh.mesh.tables import TRAIN
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2

log = logging.getLogger(__name__)
T = TypeVar("T")
# Fronts notice a new Redis within their sweep, and write the rules into an empty one; then it accepts the report.
_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The history of a run as a learner knows it.

    Attributes:
        incarnation: of the learner with this history.
        takeovers: the version from which each incarnation continued, as far as it is known.
        uses: of the surviving lineage, oldest first.
        version: in force.
        committed: every use below it is durable.
        checkpoint: folder of the last checkpoint.
    """

    incarnation: int
    takeovers: Mapping[int, int]
    uses: Sequence[StepUse]
    version: int
    committed: int
    checkpoint: str

    def survives(self, version: PolicyVersion) -> bool:
        """True where no later learner has undone it: the present weights descend from it, or are it."""
        return _survives(version, self.takeovers)

    def lacks_checkpoint(self, described: buffer_pb2.DescribeResponse) -> bool:
        """True where the buffer knows the learner, but not its last checkpoint."""
        return (
            self.incarnation == described.policy.incarnation
            and self.committed >= described.committed_version
            and self.checkpoint not in ("", described.latest_checkpoint)
        )


def read_history(run_folder: Path) -> RunHistory | None:
    """The history that the last learner of a run has left on disk; None where there was none.

    Raises:
        DataError: the log or a checkpoint is damaged.
    """
    log = run_folder / LOG_NAME
    uses = list(read_log(log)) if log.exists() else []
    checkpoints = CheckpointStore(run_folder / CHECKPOINTS_NAME).list()
    takeovers = {use.incarnation: use.resumed_at for use in uses}
    if checkpoints:
        takeovers = {**_lineage_of(checkpoints[-1][1]), **takeovers}
    if not takeovers:
        return None
    durable = [(version, folder) for version, folder in checkpoints if _survives(version, takeovers)]
    committed, folder = (durable[-1][0].version, str(durable[-1][1].resolve())) if durable else (0, "")
    kept = surviving_uses(uses, takeovers)
    version = max([committed, *(use.train_version + 1 for use in kept)])
    return RunHistory(max(takeovers), takeovers, kept, version, committed, folder)


def _survives(version: PolicyVersion, takeovers: Mapping[int, int]) -> bool:
    return all(version.version <= k for later, k in takeovers.items() if later > version.incarnation)


def _lineage_of(checkpoint: Path) -> dict[int, int]:
    path = checkpoint / STATE_NAME
    try:
        wire = json.loads(path.read_text(encoding="utf-8"))["extra"]["lineage"]
        return {int(incarnation): int(version) for incarnation, version in wire}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged: {error}",
            hint="restore this checkpoint from a copy, or remove it: the next start says how to continue without it",
        ) from error


async def assert_history(client: BufferClient, member_id: str, history: RunHistory, *, patience_s: float) -> None:
    """Reports a history to the buffer, until it is accepted.

    Raises:
        DataError: the consumption log lacks steps that the last checkpoint contains.
        FencedError: another learner has taken the run over.
        LostStateError: the buffer was not ready within `patience_s`.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + patience_s
    takeovers = [buffer_pb2.Takeover(incarnation=i, resumed_at=k) for i, k in sorted(history.takeovers.items())]
    while True:
        known = await client.describe(TRAIN)
        # Where takeovers are lost, all may be; else what lies below the last commit is known to be trained.
        since = known.committed_version if known.policy.incarnation == history.incarnation else 0
        if since < history.committed and all(use.train_version + 1 != history.committed for use in history.uses):
            # Its groups would be granted, and trained, a second time.
            raise DataError(
                f"{LOG_NAME} in the run folder lacks step {history.committed}, which the last checkpoint contains",
                hint="Redis has lost its state, so the log must be whole: restore it, or begin another run from an "
                "export of the checkpoint",
            )
        try:
            corrected, unknown = await client.reassert(
                history.incarnation,
                member_id,
                history.version,
                history.committed,
                history.checkpoint,
                takeovers,
                _to_asserted_uses(history.uses, since),
            )
        except LostStateError:
            if loop.time() > until:
                raise
            # A front offers no event for this; the loop is bounded by the patience.
            await asyncio.sleep(_AGAIN_S)
            continue
        log.warning(
            "Redis was restarted: %d uses were lost, of them %d of groups that it did not know any more",
            corrected + unknown,
            unknown,
        )
        return


def _to_asserted_uses(uses: Sequence[StepUse], since: int) -> list[buffer_pb2.AssertedUse]:
    return [
        buffer_pb2.AssertedUse(group_id=group.group_id, train_version=use.train_version, ordinal=group.ordinal)
        for use in uses
        if use.train_version >= since
        for group in use.groups
    ]


class RedisRecovery:
    """Recovers state that Redis loses under a running learner. Belongs to the event loop.

    Args:
        client: of the buffer; its calls recover through this from now on.
        member_id: of this learner.
        log: the consumption log.
        incarnation: of this learner.
        takeovers: the version from which each incarnation continued, this one among them.
        status: has the version in force, and the durable one.
        patience_s: longest time until the buffer is ready for the report.
    """

    def __init__(
        self,
        client: BufferClient,
        *,
        member_id: str,
        log: Path,
        incarnation: int,
        takeovers: Mapping[int, int],
        status: LearnerStatus,
        patience_s: float,
    ) -> None:
        self._client = client
        self._member_id = member_id
        self._log = log
        self._incarnation = incarnation
        self._takeovers = dict(takeovers)
        self._status = status
        self._patience_s = patience_s
        self._steady = asyncio.Lock()
        self._running: asyncio.Task[None] | None = None
        self.on_recovered: Callable[[buffer_pb2.DescribeResponse], None] = lambda _: None
        """Called with the buffer's state after a recovery, before anything else continues."""
        client.on_lost_state = self.repair

    async def with_recovery(self, step: Callable[[], Awaitable[T]]) -> T:
        """Runs a step that no assertion interrupts; repeats it where Redis has lost state.

        Raises:
            FencedError: another learner has taken the run over.
        """
        while True:
            try:
                async with self._steady:
                    return await step()
            except LostStateError:
                await self.repair()

    async def repair(self) -> None:
        """Reports used groups to the buffer; concurrent callers wait for the same report.

        Raises:
            RollmeshError: the buffer does not accept the report.
        """
        if self._running is None:
            self._running = asyncio.create_task(self._reassert(), name="reassert")
            self._running.add_done_callback(self._done)
        await asyncio.shield(self._running)

    def _done(self, _task: asyncio.Task[None]) -> None:
        self._running = None

    async def _reassert(self) -> None:
        async with self._steady:
            history = await asyncio.to_thread(self._history)
            await assert_history(self._client, self._member_id, history, patience_s=self._patience_s)
            self.on_recovered(await self._client.describe(TRAIN))

    def _history(self) -> RunHistory:
        uses = list(read_log(self._log)) if self._log.exists() else []
        published = self._status.published
        committed, checkpoint = self._status.durable
        return RunHistory(
            self._incarnation,
            self._takeovers,
            surviving_uses(uses, self._takeovers),
            published.version if published is not None else self._takeovers[self._incarnation],
            committed,
            checkpoint,
        )
