"""The status of a learner: written by the training thread, read by heartbeats and the control service."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import learner_pb2

Phase = Literal[
    "starting",
    "waiting_for_groups",
    "swapping",
    "training",
    "publishing",
    "checkpointing",
    "evaluating",
    "exporting",
    "ending",
]


@dataclass(frozen=True, slots=True)
class PlacementView:
    """The state of shared devices at one moment.

    Attributes:
        mode: collocated or hybrid.
        phase: the present one.
        since: monotonic seconds at which it began.
        turns, taken_back: so far.
    """

    mode: str
    phase: str
    since: float
    turns: int
    taken_back: int

    @property
    def move(self) -> str:
        """The move of the learner's own memory that is under way, from or to a disk perhaps; empty without one."""
        return self.phase if self.phase in ("onloading", "offloading") else ""

    def to_proto(self, reason: str, held_s: float) -> learner_pb2.PlacementStatus:
        """The message of the learner's status.

        Args:
            reason: of its present wait; empty without one.
            held_s: seconds for which an operator's request lets no turn begin.
        """
        return learner_pb2.PlacementStatus(
            mode=self.mode,
            phase=self.phase,
            phase_ms=max(0, round(1000 * (time.monotonic() - self.since))),
            reason=reason,
            turns=self.turns,
            taken_back=self.taken_back,
            held_ms=round(1000 * held_s),
        )


@dataclass(slots=True)
class LearnerStatus:
    """Plain fields; each is replaced as a whole, so that readers of another thread see a consistent one.

    Attributes:
        phase: the present phase of the training thread.
        published: newest version that can be fetched.
        steps: batches trained over the whole run.
        committed: uses below this version are committed.
        durable: version of the last checkpoint (of the last step with `commit: step`), and the checkpoint's folder.
        last_metrics: numeric metrics of the last step.
        waiting_reason: why it waits, for groups or for copies of checkpoints; empty when it does not.
        placement: of the devices that it shares; None where it has its own.
    """

    phase: Phase = "starting"
    published: PolicyVersion | None = None
    steps: int = 0
    committed: int = 0
    durable: tuple[int, str] = (0, "")
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    waiting_reason: str = ""
    placement: PlacementView | None = None
