"""Metrics of held-out prompts with several responses each: of one prompt, and their means over prompts.

For a prompt with n scored responses, c of them right (reward of at least `right_at`):

- mean@n is the mean reward.
- pass@k is the chance that k of them, drawn without putting back, hold a right one: `1 - C(n - c, k) / C(n, k)`. This
  is the unbiased estimate of Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374).
- maj@n is the reward of the answer given most often (Wang et al., "Self-Consistency", arXiv:2203.11171), the mean over
  the responses that give it. Among answers given equally often, it is the mean over these. The scorer of the row says
  what the answer is, and which answers are equal. A response without one does not vote, where others have one.
- best@n is the highest reward.

Each is averaged over prompts. Failed responses do not count as wrong. A prompt with fewer than k scored responses does
not count for pass@k, and one without any counts for nothing.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from decimal import Decimal

# Marks around an answer, by falling precedence; the last mark of the first kind found counts.
_MARKS = (
    re.compile(r"####([^\n]*)"),
    re.compile(r"\banswer\b[*_]{0,2}[ \t]{0,4}[:：][*_]{0,2}([^\n]*\S[^\n]*)", re.IGNORECASE),  # noqa: RUF001
    re.compile(r"=([^\n=]*)\s*\Z"),
)
_BOX, _TAG, _END_OF_TAG = r"\boxed{", "<answer>", "</answer>"
# Marks stand in so many last characters of a response.
_TAIL = 4000
_SPACE = re.compile(r"\s+")
_EDGES = "*_$`."
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,60})(?:\.\d{0,60})?")


def pass_at_k(n: int, right: int, k: int) -> float:
    """The chance that k of n responses hold one of the `right` ones; n is at least k."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority_reward(answers: Sequence[str], rewards: Sequence[float]) -> float:
    """Reward of the answer given most often; at least one response. An empty answer is none, where others are given."""
    votes: dict[str, list[float]] = defaultdict(list)
    for answer, reward in zip(answers, rewards, strict=True):
        votes[answer].append(reward)
    if len(votes) > 1:
        votes.pop("", None)
    most = max(map(len, votes.values()))
    winners = [sum(given) / most for given in votes.values() if len(given) == most]
    return sum(winners) / len(winners)


def vote_of(text: str, answer: str | None) -> str:
    """The answer for which a response votes: as its scorer reads it, or `answer_of` where the scorer reads none.

    Args:
        text: of the response.
        answer: `Scored.answer` of its reward; None for functions of users, which only give a number.
    """
    return answer_of(text) if answer is None else answer


def answer_of(response: str) -> str:
    r"""The answer of a response, as far as it shows in the text alone.

    It stands in the last `\boxed{}`, or else between the last `<answer>` tags, or else after the last `####` or
    `Answer:`. Without these it follows an `=` in the last row, or is the whole response.

    Space, markup around it and a full stop at the end do not count. Numbers are equal by value.
    """
    tail = response[-_TAIL:]
    _, boxed, after = tail.rpartition(_BOX)
    if boxed:
        return _plain(_until_closing_brace(after))
    _, tagged, after = tail.rpartition(_TAG)
    if tagged:
        return _plain(after.partition(_END_OF_TAG)[0])
    for mark in _MARKS:
        if found := mark.findall(tail):
            return _plain(found[-1])
    return _plain(response)


def prompt_metrics(scored: Sequence[tuple[float, str]], *, n: int, right_at: float) -> dict[str, float]:
    """mean@n, and pass@k for k = 1, 2, 4, ... up to n, of one prompt; with n above 1 also maj@n and best@n.

    Args:
        scored: its scored responses: reward and answer (`vote_of`). Without any there are no metrics.
        n: responses asked for.
        right_at: reward from which a response is right.
    """
    if not scored:
        return {}
    rewards = [reward for reward, _ in scored]
    right = sum(reward >= right_at for reward in rewards)
    values = {f"mean@{n}": sum(rewards) / len(rewards)}
    if n > 1:
        values[f"maj@{n}"] = majority_reward([answer for _, answer in scored], rewards)
        values[f"best@{n}"] = max(rewards)
    return values | {f"pass@{k}": pass_at_k(len(scored), right, k) for k in pass_k_values(n) if k <= len(scored)}


def pass_metrics(prompts: Iterable[Sequence[tuple[float, str]]], *, n: int, right_at: float) -> dict[str, float]:
    """Means of `prompt_metrics` over prompts; none where n is 1.

    Args:
        prompts: of each prompt the scored responses: reward and answer.
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
    answer = _SPACE.sub("", text).strip(_EDGES) or _SPACE.sub("", text)
    if _NUMBER.fullmatch(answer):
        value = Decimal(answer.replace(",", ""))
        return format(value.normalize(), "f") if value else "0"
    return answer
