"""The buffer's table `eval` as one learner uses it: tasks pinned to a version, and the end of their groups.

All methods belong to the event loop's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rollmesh.buffer.client.client import BufferClient
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.tables import EVAL
from rollmesh.mesh.trajectory.seeds import derived_seed
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2, trajectory_pb2

log = logging.getLogger(__name__)


class EvalTable:
    """The table for a learner.

    Args:
        client: of the buffer.
        incarnation: of the learner.
    """

    def __init__(self, client: BufferClient, incarnation: int) -> None:
        self._client = client
        self._incarnation = incarnation

    async def seed(
        self,
        policy: PolicyVersion,
        templates: Sequence[trajectory_pb2.PromptTask],
        *,
        end_of_data: bool,
        withdraw_pending: bool = False,
    ) -> None:
        """Adds tasks that only a generator at this very version answers.

        Args:
            policy: the version.
            templates: tasks without ordinals and version.
            end_of_data: no further ones follow.
            withdraw_pending: those of an earlier round are withdrawn in the same call.

        Raises:
            FencedError: another learner has taken over.
        """
        mark = (await self._client.describe(EVAL)).seeded
        pinned = policy.to_proto()
        tasks = []
        for ordinal, template in enumerate(templates, start=mark + 1):
            task = trajectory_pb2.PromptTask()
            task.CopyFrom(template)
            task.task_id, task.ordinal = f"eval-{policy}-{ordinal}", ordinal
            task.pinned.CopyFrom(pinned)
            # Whichever learner asks, and whatever was asked before.
            task.sampling.seed = derived_seed(template.sampling.seed, policy.version)
            tasks.append(task)
        await self._client.seed(
            EVAL, self._incarnation, tasks, end_of_data=end_of_data, withdraw_pending=withdraw_pending
        )

    async def commit(self, policy: PolicyVersion, groups: Sequence[buffer_pb2.LeasedGroup]) -> None:
        """Ends groups whose results are safe.

        Raises:
            FencedError: another learner has taken over.
        """
        leases = [buffer_pb2.LeaseRef(group_id=group.group_id, lease_id=group.lease_id) for group in groups]
        if not leases:
            return
        response = await self._client.claim(EVAL, self._incarnation, policy.version, leases)
        if not response.claimed:
            log.warning("%d evaluated groups could not be claimed; they are withdrawn", len(response.refused))
        await self._client.commit(EVAL, self._incarnation, policy.version + 1)

    async def withdraw(self) -> None:
        """Withdraws all tasks and groups that are not claimed; a failure is only reported."""
        try:
            await self._client.seed(EVAL, self._incarnation, [], withdraw_pending=True)
        except RollmeshError as error:
            log.warning("the evaluation round was not withdrawn: %s", error)
