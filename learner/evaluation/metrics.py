"""Metrics of held-out prompts with several responses each: of one prompt, and their means over prompts.

For a prompt with n scored responses, c of them right (reward of at least `right_at`):

- mean@n is the mean reward.
- pass@k is the chance that k of them, drawn without putting back, hold a right one: `1 - C(n - c, k) / C(n, k)`. This
  is the unbiased estimate of Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374).
- maj@n is the reward of the answer given most often (Wang et al., "Self-Consistency", arXiv:2203.11171), the mean over
  the responses that give it. Among answers given equally often, it is the mean over these.
- best@n is the highest reward.

Each is averaged over prompts. Failed responses do not count as wrong. A prompt with fewer than k scored responses does
not count for pass@k, and one without any counts for nothing.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

# Marks before an answer, by falling precedence; the last mark of the first kind found counts.
_MARKS = (r"\boxed{", "####", "=")
_SPACE = re.compile(r"\s+")


def pass_at_k(n: int, right: int, k: int) -> float:
    """The chance that k of n responses hold one of the `right` ones; n is at least k."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority_reward(answers: Sequence[str], rewards: Sequence[float]) -> float:
    """Reward of the answer given most often; at least one response."""
    votes: dict[str, list[float]] = defaultdict(list)
    for answer, reward in zip(answers, rewards, strict=True):
        votes[answer].append(reward)
    most = max(map(len, votes.values()))
    winners = [sum(given) / most for given in votes.values() if len(given) == most]
    return sum(winners) / len(winners)


def answer_of(response: str) -> str:
    r"""The answer of a response: inside its last `\boxed{}`, else after its last `####` or `=`, else all of it.

    Space does not count, nor a full stop at the end.
    """
    for mark in _MARKS:
        _, found, after = response.rpartition(mark)
        if found:
            return _plain(_until_closing_brace(after) if mark == _MARKS[0] else after.partition("\n")[0])
    return _plain(response)


def prompt_metrics(scored: Sequence[tuple[float, str]], *, n: int, right_at: float) -> dict[str, float]:
    """mean@n, and pass@k for k = 1, 2, 4, ... up to n, of one prompt; with n above 1 also maj@n and best@n.

    Args:
        scored: its scored responses: reward and text. Without any there are no metrics.
        n: responses asked for.
        right_at: reward from which a response is right.
    """
    if not scored:
        return {}
    rewards = [reward for reward, _ in scored]
    right = sum(reward >= right_at for reward in rewards)
    values = {f"mean@{n}": sum(rewards) / len(rewards)}
    if n > 1:
        values[f"maj@{n}"] = majority_reward([answer_of(text) for _, text in scored], rewards)
        values[f"best@{n}"] = max(rewards)
    return values | {f"pass@{k}": pass_at_k(len(scored), right, k) for k in pass_k_values(n) if k <= len(scored)}


def pass_metrics(prompts: Iterable[Sequence[tuple[float, str]]], *, n: int, right_at: float) -> dict[str, float]:
    """Means of `prompt_metrics` over prompts; none where n is 1.

    Args:
        prompts: of each prompt the scored responses: reward and text.
        n: responses asked for per prompt.
        right_at: reward from which a response is right.
    """
    if n == 1:
        return {}
    values: dict[str, list[float]] = defaultdict(list)
    for scored in prompts:
        for name, value in prompt_metrics(scored, n=n, right_at=right_at).items():
            values[name].append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def pass_k_values(n: int) -> list[int]:
    """The k of pass@k: powers of two below n, and n."""
    return [*(1 << power for power in range(n.bit_length()) if 1 << power < n), n]


def _until_closing_brace(text: str) -> str:
    """Up to the brace that closes the one before `text`; all of it where none does."""
    depth = 1
    for index, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:index]
    return text


def _plain(text: str) -> str:
    return _SPACE.sub("", text).rstrip(".")
