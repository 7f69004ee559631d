"""When to say that rewards are slow, what is known of why, and which key changes it.

A slow reward loses nothing: generators stop where too many responses wait, and the learner waits for them.
"""

from __future__ import annotations

from rollmesh.launcher.mesh_monitor import Snapshot
from rollmesh.mesh.config.models import RewardSection
from rollmesh.mesh.runtime.threads import reward_workers
from rollmesh.protos import membership_pb2

_LEAST_S = 10.0
# Rewards were quick for so long: what was told before is over.
_FORGOTTEN_S = 300.0


class SlowRewards:
    """To be told once a response has waited for long, and whenever one has waited twice as long as was told.

    After a time without slow rewards it begins from the start.

    Args:
        now: seconds of the clock.
    """

    def __init__(self, now: float) -> None:
        self._after = _LEAST_S
        self._slow_at = now

    def due(self, waited_s: float, now: float) -> bool:
        """Whether that is to be told now.

        Args:
            waited_s: how long the first response that has no reward yet has waited.
            now: seconds of the clock.
        """
        if waited_s >= _LEAST_S:
            self._slow_at = now
        elif now - self._slow_at >= _FORGOTTEN_S:
            self._after = _LEAST_S
        if waited_s < self._after:
            return False
        self._after = 2 * waited_s
        return True


def reward_wait_s(snapshot: Snapshot) -> float:
    """How long the first response that has no reward yet has waited."""
    return max((member.gauges.get("reward_wait_seconds", 0.0) for member in snapshot.generators()), default=0.0)


def slow_rewards(snapshot: Snapshot, reward: RewardSection) -> str:
    """In words.

    Args:
        snapshot: of now.
        reward: the configuration.
    """
    waiting = snapshot.sum_of("members_unscored")
    services = (member for member in snapshot.members if member.role == membership_pb2.ROLE_REWARD)
    why = next((member.waiting_reason for member in services if member.waiting_reason), "")
    said = f"rewards are slow: {waiting:.0f} responses wait for theirs, the first of them for"
    said += f" {reward_wait_s(snapshot):.0f} s{f' ({why})' if why else ''}; nothing is lost, the run waits. "
    if reward.endpoints:
        return f"{said}More services in reward.endpoints score more at a time"
    return f"{said}More workers score more at a time: --reward.workers={2 * max(reward_workers(reward.workers))}"
