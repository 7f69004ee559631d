"""A receiver in a process of its own, so that it can be killed.

    python -m tests.generators.weights.receiving LEARNER_ADDRESS MEMBER_ID

It prints a line when the first bucket of a version agrees with its digest.
"""

from __future__ import annotations

import asyncio
import sys

from rollmesh.generators.weights import Relay, WeightReceiver
from rollmesh.generators.weights.learner_connection import LearnerDirectory
from rollmesh.generators.weights.receiver import ReceiverSettings
from rollmesh.generators.weights.relay import RelayedBuckets
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.weights import BucketSet
from tests.generators.weights.test_receiver import Engine, Membership


class Halfway(Relay):
    """Says when the first bucket of a transfer is there; relays nothing."""

    def __init__(self) -> None:
        super().__init__("")
        self.reached = asyncio.Event()

    def begin(self, bucket_set: BucketSet) -> RelayedBuckets:
        """See Relay."""
        holding = super().begin(bucket_set)
        add_verified = holding.add_verified

        def noted(data: memoryview, index: int) -> None:
            add_verified(data, index)
            self.reached.set()

        holding.add_verified = noted  # type: ignore[method-assign]  # watched
        return holding


async def _receive(address: str, member_id: str) -> None:
    membership = Membership()
    membership.name("learner-1", int(address.rpartition(":")[2]))
    link = LearnerDirectory(membership, SecuritySection())  # type: ignore[arg-type]  # the part of the agent that it uses
    halfway = Halfway()
    receiver = WeightReceiver(
        link,
        Engine(),  # type: ignore[arg-type]  # the part of an engine that it uses
        ReceiverSettings(member_id=member_id, run="run", host_id="elsewhere", transport="grpc"),
        relay=halfway,
    )
    running = asyncio.create_task(receiver.run())
    await halfway.reached.wait()
    print("halfway", flush=True)
    await running


if __name__ == "__main__":
    asyncio.run(_receive(*sys.argv[1:]))
