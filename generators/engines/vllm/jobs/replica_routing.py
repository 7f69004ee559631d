"""Routes jobs to replicas of the model (data parallelism): jobs with the same prompt to the same replica.

Each replica has a prefix cache of its own. Members of a group on several replicas would compute their prompt on each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


class ReplicaRouter:
    """Counts the jobs of every replica; a prompt keeps its replica for as long as any of its jobs runs.

    Args:
        count: of replicas.
    """

    def __init__(self, count: int) -> None:
        self._jobs = [0] * count
        self._replica: dict[Hashable, int] = {}
        self._jobs_of_prompt: Counter[Hashable] = Counter()

    def assign(self, prompt: Hashable) -> int:
        """The replica for one more job of a prompt; for a new prompt the one with the fewest jobs."""
        replica = self._replica.setdefault(prompt, self._jobs.index(min(self._jobs)))
        self._jobs[replica] += 1
        self._jobs_of_prompt[prompt] += 1
        return replica

    def release(self, prompt: Hashable) -> None:
        """Records the end of a job of the prompt."""
        self._jobs[self._replica[prompt]] -= 1
        self._jobs_of_prompt[prompt] -= 1
        if not self._jobs_of_prompt[prompt]:
            del self._jobs_of_prompt[prompt], self._replica[prompt]
