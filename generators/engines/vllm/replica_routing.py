"""Which copy of the model (data parallelism) decodes a job: jobs with the same prompt the same copy.

Each copy has a prefix cache of its own. Wherever the members of a group came to several, each would compute the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


class Copies:
    """Counts the jobs of every copy; a prompt keeps its copy for as long as any of its jobs runs.

    Args:
        count: of copies.
    """

    def __init__(self, count: int) -> None:
        self._jobs = [0] * count
        self._copy: dict[Hashable, int] = {}
        self._of_prompt: Counter[Hashable] = Counter()

    def take(self, prompt: Hashable) -> int:
        """The copy for one more job of a prompt: of a new prompt's the one with the fewest jobs."""
        copy = self._copy.setdefault(prompt, self._jobs.index(min(self._jobs)))
        self._jobs[copy] += 1
        self._of_prompt[prompt] += 1
        return copy

    def give_back(self, prompt: Hashable) -> None:
        """A job of the prompt has ended."""
        self._jobs[self._copy[prompt]] -= 1
        self._of_prompt[prompt] -= 1
        if not self._of_prompt[prompt]:
            del self._of_prompt[prompt], self._copy[prompt]
