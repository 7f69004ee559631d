"""Priorities of groups that may be trained again; the learner sets them when it uses a group.

A new group enters with priority 1; from its first use on it has the priority that `buffer.priority` gives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.algorithms.types import Group
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.tables import TRAIN
from rollmesh.mesh.user_code import load_callable

Priority = Callable[[Group], float]
# Priority of a group with equal rewards: it has no gradient, but can still be drawn.
_LEAST = 1e-3


def reward_std(group: Group) -> float:
    """Standard deviation of the scored rewards: groups with mixed outcomes have the largest advantages."""
    rewards = group.rewards[group.scored]
    return max(_LEAST, float(rewards.std(correction=0))) if rewards.numel() else _LEAST


def priority_function(config: Config) -> Priority | None:
    """The function that `buffer.priority` names; None where priorities are not drawn by, or all equal.

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
    """Sets priorities of groups that are about to be claimed.

    Args:
        client: of the buffer.
        priority: of a group, positive.
        incarnation: of this learner.
        max_reuse: groups at their last use are left out.
    """

    def __init__(self, client: BufferClient, priority: Priority, *, incarnation: int, max_reuse: int) -> None:
        self._client = client
        self._priority = priority
        self._incarnation = incarnation
        self._max_reuse = max_reuse

    async def set(self, groups: Sequence[SampledGroup]) -> None:
        """Sets the priorities that leased groups have after this use; groups that it uses up are left out.

        Raises:
            ConfigError: the user's function raised, or gave no positive number.
        """
        again = [group for group in groups if group.leased.use < self._max_reuse]
        if again:
            values = {group.group_id: self._checked_priority(group) for group in again}
            await self._client.set_priorities(TRAIN, self._incarnation, values)

    def _checked_priority(self, group: SampledGroup) -> float:
        try:
            value = float(self._priority(group.algorithm_view))
        except Exception as error:  # a user's function may raise anything
            raise ConfigError(
                f"buffer.priority raised {type(error).__name__} for group {group.group_id}: {error}",
                hint="it takes a Group and returns a positive number",
            ) from error
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"buffer.priority gave {value} for group {group.group_id}", hint="priorities are positive and finite"
            )
        return value
