"""Priorities of groups that may be trained again: what the learner tells the buffer after a group's use.

A new group enters with priority 1; after a use it has the priority that `buffer.priority` gives it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from buffer.client import BufferClient
from learner.algorithms.types import Group
from learner.groups import SampledGroup
from learner.screening import algorithm_view
from mesh.config import Config
from mesh.errors import ConfigError
from mesh.user_code import load_callable

_log = logging.getLogger(__name__)
Priority = Callable[[Group], float]
# Priority of a group whose rewards do not differ: it teaches nothing, but can still be drawn.
_LEAST = 1e-3


def reward_std(group: Group) -> float:
    """Standard deviation of the scored rewards: groups with mixed outcomes have the largest advantages."""
    rewards = group.rewards[group.scored]
    return max(_LEAST, float(rewards.std(correction=0))) if rewards.numel() else _LEAST


def priority_function(config: Config) -> Priority | None:
    """What `buffer.priority` names; None where nothing is drawn by priorities, or all have the same.

    Raises:
        ConfigError: it names nothing that can be loaded.
    """
    section = config.buffer
    if section.order != "priority" or section.max_reuse == 1 or section.priority == "uniform":
        return None
    if section.priority == "reward_std":
        return reward_std
    return load_callable(section.priority, "buffer.priority", ConfigError)


class PrioritySetter:
    """Sets priorities of claimed groups.

    Args:
        client: of the buffer.
        priority: of a group, positive.
        incarnation: of this learner.
        max_reuse: groups that were used so often are left alone.
    """

    def __init__(self, client: BufferClient, priority: Priority, *, incarnation: int, max_reuse: int) -> None:
        self._client = client
        self._priority = priority
        self._incarnation = incarnation
        self._max_reuse = max_reuse

    async def used(self, groups: Sequence[SampledGroup]) -> None:
        """Tells the buffer the priorities of groups that were just claimed.

        Raises:
            ConfigError: the user's function gave no positive number.
        """
        again = [group for group in groups if group.leased.use < self._max_reuse]
        if again:
            values = {group.group_id: self._checked(group) for group in again}
            await self._client.set_priorities("train", self._incarnation, values)

    def _checked(self, group: SampledGroup) -> float:
        value = float(self._priority(algorithm_view(group)))
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"buffer.priority gave {value} for group {group.group_id}", hint="priorities are positive and finite"
            )
        return value
