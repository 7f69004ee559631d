"""The learner's side of the buffer's table `train`, once a run is taken over."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.coordinator.prompt_seeder import PromptSeeder
from rollmesh.learner.metrics.sample_log import SampleFetcher
from rollmesh.learner.recording.recording import BatchRecorder
from rollmesh.learner.recovery.redis_recovery import RedisRecovery
from rollmesh.learner.rollouts.group_stream import GroupStream


@dataclass(frozen=True, slots=True)
class TrainTable:
    """The running parts that feed the training.

    Attributes:
        client: of the buffer.
        groups: leased ones, for this version and the next.
        seeder: keeps prompt tasks ahead of the generators.
        recovery: replays what Redis has lost.
        recorder: keeps claimed batches on disk; None: they are not kept.
        samples: fetches what is missing of the responses that are kept for people.
    """

    client: BufferClient
    groups: GroupStream
    seeder: PromptSeeder
    recovery: RedisRecovery
    recorder: BatchRecorder | None = None
    samples: SampleFetcher | None = None
