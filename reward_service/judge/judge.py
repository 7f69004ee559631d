"""The judge as a reward function: items in, outcomes out.

A group that could not be judged in time is sent again, and only the questions without a verdict are asked then. So
verdicts are kept, by their question; equal responses to one prompt share theirs.

Invariants: an item whose questions have not all been answered has no score. Limits and budget count for all items of a
process, whatever sources name the judge.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rollmesh.mesh.config.scorers.judge import NAME, JudgeSection
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.text import bounded
from rollmesh.mesh.wait import NO_WAIT, Wait
from rollmesh.reward_service.judge import pairs
from rollmesh.reward_service.judge.accounts import Accounts
from rollmesh.reward_service.judge.asking import Asker
from rollmesh.reward_service.judge.endpoint import Address
from rollmesh.reward_service.judge.errors import BusyError, JudgeError
from rollmesh.reward_service.judge.evidence import Evidence
from rollmesh.reward_service.judge.templates import Template
from rollmesh.reward_service.judge.verdicts import Verdict, combined, score_on, winner
from rollmesh.reward_service.outcomes import NOT_BEGUN, Failed, Outcome, RewardItem, Scored, Unscorable

T = TypeVar("T")

# Verdicts that are kept, 1 KiB each at most.
_KEPT = 1 << 16
# Characters of a reason that is kept.
_REASON = 600
# Raised whenever the judge's own part of a score changes: what is asked beside the template, and how it is read.
_VERSION = 2
# Share of a call's time in which its questions have to be answered.
_SHARE = 0.9
# Seconds after which a group without room may come again, at least.
_LEAST_S = 0.2
# Seconds for which a lack of room is reported.
_RECENT_S = 10.0


@dataclass(slots=True)
class _Answer:
    """A verdict that is kept, and what it has cost: the first score that uses it has that cost."""

    verdict: Verdict
    cost: float

    def pay(self) -> float:
        """The cost that is due now."""
        cost, self.cost = self.cost, 0.0
        return cost


class Judge:
    """Asks a language model.

    Args:
        section: of the configuration.
        call_timeout_s: seconds in which a call has to end, `reward.scorer_timeout_s`.

    Raises:
        ConfigError: a file with a secret or a certificate cannot be used.
        RewardError: the template cannot.

    Attributes:
        version: of its scores: another template, model or option makes another one.
        rollmesh_service: the file of its reasons, which the scoring engine closes.
    """

    __name__ = NAME
    wants = ()

    def __init__(self, section: JudgeSection, *, call_timeout_s: float) -> None:
        self._section = section
        self.needs_group = section.mode == "pairs"
        self._begin_s = _SHARE * call_timeout_s - section.timeout_s
        self._template = Template(section.template, section.mode, section.scale)
        self._question = score_on(section.scale) if section.mode == "score" else winner()
        self._address = Address.of(section)
        self.rollmesh_service = self._evidence = Evidence(section.evidence_file)
        self._verdicts: OrderedDict[bytes, _Answer] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[_Answer]] = {}
        self._accounts = Accounts(section)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asker: Asker | None = None
        self._busy: BusyError | None = None
        self._busy_at = -math.inf
        self.version = judge_version(section, self._template)

    def present_wait(self) -> Wait:
        """The reason why items wait: there was no room for a request a moment ago; empty while there is."""
        if self._busy is None or time.monotonic() - self._busy_at > _RECENT_S:
            return NO_WAIT
        return Wait(f"{NAME}: {self._busy}")

    @property
    def cache_version(self) -> str | None:
        """All on which a score depends besides the item; none for pairs, as these depend on other items too."""
        return None if self._section.mode == "pairs" else f"{self.version} {self._section.base_url}"

    @property
    def accounts(self) -> Accounts:
        """Limits, budget and times of the process."""
        return self._accounts

    async def __call__(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """Outcomes of a group's items."""
        began = time.monotonic()
        begin_by = began + self._begin_s
        if self._section.mode == "pairs":
            outcomes = await self._compared(items, begin_by)
        else:
            outcomes = list(await asyncio.gather(*(self._scored(item, begin_by) for item in items)))
        if any(isinstance(outcome, Failed) and outcome.code == NOT_BEGUN for outcome in outcomes):
            # They are sent again at once.
            await asyncio.sleep(max(begin_by, began + _LEAST_S) - time.monotonic())
        return outcomes

    # ------------------------------------------------------------------------------------------ scores

    async def _scored(self, item: RewardItem, begin_by: float) -> Outcome:
        try:
            answers = await self._votes(item, {"response": item.response}, begin_by)
        except JudgeError as error:
            return error.outcome()
        except PayloadError as error:
            return Failed("bad_input", f"{NAME}: {error}")
        low, high = self._section.scale
        votes = [answer.verdict.value for answer in answers]
        score = combined(votes, self._section.combine)
        components = {"score": score}
        if len(votes) > 1:
            components["spread"] = max(votes) - min(votes)
        evidence = "\n".join(f"{vote:g}: {answer.verdict.reason}" for vote, answer in zip(votes, answers, strict=True))
        return Scored((score - low) / (high - low), components, evidence=evidence, cost=_paid(answers))

    # ------------------------------------------------------------------------------------------ pairs

    async def _compared(self, items: Sequence[RewardItem], begin_by: float) -> list[Outcome]:
        if len(items) < 2:
            return [Unscorable("the group has no other response to compare with")] * len(items)
        scheduled = pairs.schedule(len(items), self._section.opponents)
        try:
            found = await _all(self._both_orders(items[one], items[other], begin_by) for one, other in scheduled)
        except JudgeError as error:
            return [error.outcome()] * len(items)
        except PayloadError as error:
            return [Failed("bad_input", f"{NAME}: {error}")] * len(items)
        values = {pair: self._values(answers) for pair, answers in zip(scheduled, found, strict=True)}
        # Both responses of a pair have been compared for its cost.
        costs = [0.0] * len(items)
        reasons: list[list[str]] = [[] for _ in items]
        for (one, other), orders in zip(scheduled, found, strict=True):
            paid = sum(map(_paid, orders)) / 2
            for here, there, place in ((one, other, 0), (other, one, 1)):
                costs[here] += paid
                reasons[here] += [
                    f"with {items[there].item_id}, {'second' if order != place else 'first'}: {answer.verdict.reason}"
                    for order, answers in enumerate(orders)
                    for answer in answers
                ]
        return [
            Scored(won, {"order_agreement": agreed}, evidence="\n".join(texts), cost=cost)
            for (won, agreed), texts, cost in zip(pairs.rewards(len(items), values), reasons, costs, strict=True)
        ]

    def _values(self, orders: Sequence[Sequence[_Answer]]) -> tuple[float, float]:
        """Values for the first of a pair, in the first place and in the second."""
        if not orders:
            return 0.5, 0.5
        forward, backward = (
            combined([answer.verdict.value for answer in answers], self._section.combine) for answers in orders
        )
        return forward, 1.0 - backward

    async def _both_orders(self, one: RewardItem, other: RewardItem, begin_by: float) -> list[list[_Answer]]:
        """Answers with `one` in the first place, and in the second; none about equal responses."""
        if one.response == other.response:
            return []
        return await _all(
            self._votes(left, {"first": left.response, "second": right.response}, begin_by)
            for left, right in ((one, other), (other, one))
        )

    # ------------------------------------------------------------------------------------------ questions

    async def _votes(self, item: RewardItem, responses: Mapping[str, str], begin_by: float) -> list[_Answer]:
        messages = self._template.messages(item, responses)
        digest = hashlib.sha256(json.dumps(messages).encode()).digest()
        return await _all(self._answer(digest, item, messages, vote, begin_by) for vote in range(self._section.votes))

    async def _answer(
        self, digest: bytes, item: RewardItem, messages: list[dict[str, str]], vote: int, begin_by: float
    ) -> _Answer:
        """One vote: kept, or being asked for already, or asked for."""
        asker = self._asker_here()
        key = digest + vote.to_bytes(4)
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            self._accounts.counts.votes["kept"] += 1
            return self._verdicts[key]
        task = self._asked.get(key)
        if task is None:
            task = asyncio.create_task(self._ask(asker, key, item, messages, vote, begin_by))
            self._asked[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        # Others may wait for the same, and what is paid for is kept.
        return await asyncio.shield(task)

    async def _ask(
        self,
        asker: Asker,
        key: bytes,
        item: RewardItem,
        messages: list[dict[str, str]],
        vote: int,
        begin_by: float,
    ) -> _Answer:
        paid: list[float] = []
        try:
            verdict = await asker.verdict(messages, vote, begin_by, paid)
        except BusyError as error:
            self._busy, self._busy_at = error, time.monotonic()
            raise
        answer = _Answer(Verdict(verdict.value, bounded(verdict.reason, _REASON)), sum(paid))
        self._accounts.counts.votes["asked"] += 1
        self._verdicts[key] = answer
        if len(self._verdicts) > _KEPT:
            self._verdicts.popitem(last=False)
        self._evidence.add(
            {
                "group_id": item.group_id,
                "item_id": item.item_id,
                "question": key.hex()[:16],
                "vote": vote,
                "value": verdict.value,
                "reason": verdict.reason,
                "model": self._section.model,
            }
        )
        return answer

    def _forget(self, key: bytes, task: asyncio.Task[_Answer]) -> None:
        if self._asked.get(key) is task:
            del self._asked[key]
        # All who waited may be gone; a failure is theirs to report.
        if not task.cancelled():
            task.exception()

    def _asker_here(self) -> Asker:
        """The asker of the running event loop: a loop that was blocked has been replaced."""
        loop = asyncio.get_running_loop()
        if self._asker is None or self._loop is not loop:
            self._loop = loop
            self._asked = {}
            self._asker = Asker(self._section, self._address, self._accounts, self._question)
        return self._asker


def _paid(answers: Sequence[_Answer]) -> float:
    return sum(answer.pay() for answer in answers)


def judge_version(section: JudgeSection, template: Template) -> str:
    """A name for everything on which a score depends, as far as it is ours."""
    fields = {"model", "mode", "scale", "opponents", "votes", "combine", "structured", "temperature", "max_tokens"}
    settings = section.model_dump(mode="json", include={*fields, "options"})
    content = json.dumps([settings, template.texts], sort_keys=True, default=str)
    return f"{_VERSION}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of coroutines, all of which end.

    Raises:
        JudgeError: of one that failed: one that lasts comes first, a lack of room last.
        Exception: as a coroutine has raised it.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    if errors := [result for result in results if isinstance(result, BaseException)]:
        raise min(errors, key=_rank)
    return [result for result in results if not isinstance(result, BaseException)]


def _rank(error: BaseException) -> int:
    if not isinstance(error, JudgeError):
        return 0
    return 3 if isinstance(error, BusyError) else 1 + error.retryable
