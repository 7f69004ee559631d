"""The status of a learner: written by the training thread, read by heartbeats and the control service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollmesh.mesh.trajectory.versions import PolicyVersion

Phase = Literal[
    "starting", "waiting_for_groups", "training", "publishing", "checkpointing", "evaluating", "exporting", "ending"
]


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
    """

    phase: Phase = "starting"
    published: PolicyVersion | None = None
    steps: int = 0
    committed: int = 0
    durable: tuple[int, str] = (0, "")
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    waiting_reason: str = ""
