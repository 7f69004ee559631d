"""The process of rank 0, which its parts share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.distributed.rank_group import RankGroup
from rollmesh.learner.distributed.trajectories import InlineTrajectories
from rollmesh.learner.roles.remote_role import RemoteRole
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.runtime.async_bridge import AsyncBridge


@dataclass(frozen=True, slots=True)
class LearnerRuntime:
    """The process around a run: there before the run is taken over, and until its end.

    Attributes:
        bridge: the event loop.
        ranks: all ranks.
        trajectories: where one rank keeps those that came with the leases.
        controls: requests to the training thread, from signals, the control service and background tasks.
        status: of the learner, for its reports.
        elsewhere: roles whose models other processes hold.
    """

    bridge: AsyncBridge
    ranks: RankGroup
    trajectories: InlineTrajectories
    controls: ControlRequests
    status: LearnerStatus
    elsewhere: Mapping[str, RemoteRole] = field(default_factory=dict)
