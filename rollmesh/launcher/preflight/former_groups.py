"""Groups of a run that continues which were begun before its configuration changed: they keep what they had.

A group's task holds its prompt and how it is sampled, from the moment at which it is queued. Its reward comes when it
is sampled. Both outlive the learner, as far as Redis does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.mesh.config.models import Config

# Keys and sections whose values a queued task holds: which row it is of, its prompt, how it is sampled.
_QUEUED = (
    *("run.seed", "data.train", "data.shuffle", "data.curriculum", "data.prompt_key", "data.chat_template_kwargs"),
    *("data.on_long_prompt", "rollout.agent.tools", "rollout.agent.environment", "rollout.agent.program"),
    *("rollout.n", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.stop"),
    *("rollout.max_prompt_tokens", "rollout.max_response_tokens"),
)
# Sections by which a response comes about, and is scored.
_SAMPLED = ("rollout.agent", "reward")


@dataclass(frozen=True, slots=True)
class FormerGroups:
    """The groups that still have previous values.

    Attributes:
        keys: that have changed, by what they decide.
        steps: that may train such groups.
        after: the step from which the run continues.
    """

    keys: tuple[str, ...]
    steps: int
    after: int

    def line(self) -> str:
        """The groups in words."""
        return (
            f"groups that were queued or sampled before train first, in up to {self.steps} steps: from step "
            f"{self.after + self.steps + 1} on at the latest all are of the new {', '.join(self.keys)}; --fresh begins "
            "without them"
        )


def former_groups(
    before: Mapping[str, Any], now: Config, changed: Sequence[str], *, edited: bool, step: int, trained: int
) -> FormerGroups | None:
    """The groups that a change leaves as they were; None if it leaves none.

    Args:
        before: configuration of the last launch, as JSON; keys that it lacks are taken to be as they are now.
        now: configuration of this one.
        changed: keys that differ.
        edited: files by which responses come about and are scored differ too.
        step: from which the run continues.
        trained: the last step that was trained.
    """
    buffer = {**now.buffer.model_dump(mode="json"), **before["buffer"]}
    if buffer["durability"] == "none" and buffer["redis"] is None:
        # The queue has ended with the run's own Redis.
        return None
    queued = [key for key in changed if is_queued(key)]
    sampled = [key for key in changed if _is_of(key, _SAMPLED) and key not in queued]
    if not (queued or sampled or edited):
        return None
    # The bound on the age of samples leaves no more, also where later steps are undone.
    steps = now.buffer.max_staleness + 1
    if queued:
        # Tasks: a window and a batch more, what is in progress, and what was trained since and may be queued again.
        batches = buffer["seed_ahead"] + 1 + buffer["max_staleness"] + 1 + max(0, trained - step)
        batch = before.get("learner", {}).get("batch", {}).get("groups", now.learner.batch.groups)
        groups = batches * batch * buffer["max_reuse"]
        steps = max(steps, math.ceil(groups / now.learner.batch.groups))
    return FormerGroups((*queued, *sampled, *(["files"] if edited else [])), steps, step)


def is_queued(key: str) -> bool:
    """True for a key whose value a queued task holds."""
    return _is_of(key, _QUEUED)


def _is_of(key: str, names: Sequence[str]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in names)
