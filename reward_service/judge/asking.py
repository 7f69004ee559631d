"""Asks one question until there is a verdict: within limits and budget, again after failures, twice where it is slow.

Invariant: each request has been counted by limits and budget before it is sent. None is begun so late that it could not
end in time.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rollmesh.mesh.config.scorers.judge import JudgeSection
from rollmesh.reward_service.judge.budget import UNUSED, Budget, Usage
from rollmesh.reward_service.judge.endpoint import Address, Endpoint, Reply, keep_open
from rollmesh.reward_service.judge.errors import (
    AnswerError,
    BusyError,
    JudgeError,
    RefusedError,
    ThrottledError,
    UnavailableError,
)
from rollmesh.reward_service.judge.hedging import Hedging
from rollmesh.reward_service.judge.limits import Limits
from rollmesh.reward_service.judge.retries import backoff_s
from rollmesh.reward_service.judge.templates import Messages
from rollmesh.reward_service.judge.verdicts import Question, Verdict

# Characters of an answer that its repair shows to the judge, and tokens that a message adds to its text.
_SHOWN = 4000
_MESSAGE_TOKENS = 8
_BYTES_PER_TOKEN = 3


class Accounts:
    """Limits, budget and times, which all requests of a process share.

    Args:
        section: of the configuration.
    """

    def __init__(self, section: JudgeSection) -> None:
        self.limits = Limits(section.requests_per_minute, section.tokens_per_minute, time.monotonic())
        self.budget = Budget(section.budget_tokens, section.budget_cost, section.prompt_price, section.answer_price)
        self.hedging = Hedging(section.hedged_share)


class Asker:
    """Asks one endpoint, on the event loop on which it is made.

    Args:
        section: of the configuration.
        address: of the endpoint.
        accounts: of the process.
        question: the kind of verdict that is wanted.
    """

    def __init__(self, section: JudgeSection, address: Address, accounts: Accounts, question: Question) -> None:
        self._section = section
        self._question = question
        self._accounts = accounts
        self._free = asyncio.Semaphore(section.concurrency)
        self._endpoint = Endpoint(address)
        self._kept = asyncio.create_task(keep_open(self._endpoint))

    async def verdict(self, messages: Messages, vote: int, begin_by: float) -> Verdict:
        """A verdict; an answer that is none is shown to the judge once.

        Args:
            messages: the question.
            vote: its number among those of one question.
            begin_by: monotonic time after which no request is begun.

        Raises:
            JudgeError: there is none.
        """
        reply = await self._reply(messages, vote, begin_by)
        try:
            return self._question.read(reply.text)
        except AnswerError as error:
            wrong = error
        complaint = (
            f"That is not what was asked for: {wrong.message}. Answer with one JSON object of this schema and nothing "
            f"else: {json.dumps(self._question.schema)}"
        )
        repair = [
            *messages,
            {"role": "assistant", "content": reply.text[:_SHOWN]},
            {"role": "user", "content": complaint},
        ]
        try:
            return self._question.read((await self._reply(repair, vote, begin_by)).text)
        except BusyError:
            # The question was answered, and wrongly: to call it not begun would repeat it without end.
            raise wrong from None

    async def _reply(self, messages: Messages, vote: int, begin_by: float) -> Reply:
        body = self._body(messages, vote)
        estimate = Usage(sum(map(_tokens, messages)), self._section.max_tokens)
        failures = 0
        last: UnavailableError | None = None
        while True:
            try:
                return await self._begin(body, estimate, begin_by)
            except ThrottledError as error:
                if error.retry_after_s is not None:
                    self._accounts.limits.pause(error.retry_after_s, time.monotonic())
                failed: ThrottledError | UnavailableError = error
            except UnavailableError as error:
                failed = last = error
            except BusyError as error:
                raise (last or error) from None
            failures += 1
            wait_s = max(backoff_s(failures, random.random()), failed.retry_after_s or 0.0)  # noqa: S311 - no secret
            if time.monotonic() + wait_s > begin_by:
                raise last or failed
            await asyncio.sleep(wait_s)

    async def _begin(self, body: Mapping[str, Any], estimate: Usage, begin_by: float) -> Reply:
        """One request; a second one where it is slow and there is room."""
        async with self._room(estimate, begin_by) as used:
            slow_s = self._accounts.hedging.begin()
            requests = {asyncio.create_task(self._send(body, used))}
            try:
                done, _ = await asyncio.wait(requests, timeout=slow_s)
                if not done and self._accounts.hedging.take():
                    requests.add(asyncio.create_task(self._send_again(body, estimate)))
                return await _first_answer(requests)
            finally:
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)

    async def _send_again(self, body: Mapping[str, Any], estimate: Usage) -> Reply:
        async with self._room(estimate, time.monotonic()) as used:
            return await self._send(body, used)

    async def _send(self, body: Mapping[str, Any], used: list[Usage]) -> Reply:
        began = time.monotonic()
        try:
            reply = await self._endpoint.ask(body)
        except (ThrottledError, RefusedError):
            used.append(UNUSED)
            raise
        self._accounts.hedging.answered(time.monotonic() - began)
        if reply.usage is not None:
            used.append(reply.usage)
        return reply

    @asynccontextmanager
    async def _room(self, estimate: Usage, begin_by: float) -> AsyncIterator[list[Usage]]:
        """Waits for the turn of a request, and counts it; the block appends its use where that becomes known.

        Raises:
            BusyError: there is no room in time.
            SpentError: the budget is spent.
        """
        limits, budget, now = self._accounts.limits, self._accounts.budget, time.monotonic()
        delay_s = limits.delay_s(estimate.total, now)
        if delay_s and now + delay_s > begin_by:
            raise BusyError(f"its limits allow the next request in {delay_s:.1f} s")
        budget.reserve(estimate)
        limits.take(estimate.total, now)
        used: list[Usage] = []
        begun = False
        try:
            await asyncio.sleep(delay_s)
            await self._acquire(begin_by)
            begun = True
            try:
                yield used
            finally:
                self._free.release()
        finally:
            spent = used[0] if used else estimate if begun else UNUSED
            budget.settle(estimate, spent)
            # An endpoint counts a request that it refuses, too.
            limits.take(spent.total - estimate.total, time.monotonic(), requests=0 if begun else -1)

    async def _acquire(self, begin_by: float) -> None:
        if not self._free.locked():
            await self._free.acquire()
            return
        try:
            async with asyncio.timeout(begin_by - time.monotonic()):
                await self._free.acquire()
        except TimeoutError as error:
            raise BusyError(f"{self._section.concurrency} requests are in progress") from error

    def _body(self, messages: Messages, vote: int) -> dict[str, Any]:
        section = self._section
        body: dict[str, Any] = {
            "model": section.model,
            "messages": messages,
            "max_completion_tokens": section.max_tokens,
        }
        if section.temperature is not None:
            body["temperature"] = section.temperature
        if section.votes > 1:
            body["seed"] = vote
        if section.structured == "json_object":
            body["response_format"] = {"type": "json_object"}
        elif section.structured == "json_schema":
            form = {"name": "verdict", "strict": True, "schema": self._question.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return {**body, **section.options}


def _tokens(message: Mapping[str, str]) -> int:
    """About as many tokens as a message has; rather too many."""
    return len(message["content"].encode("utf-8", "replace")) // _BYTES_PER_TOKEN + _MESSAGE_TOKENS


async def _first_answer(requests: set[asyncio.Task[Reply]]) -> Reply:
    """The first answer; the first request's error if there is none.

    Raises:
        JudgeError: of the first request that failed.
    """
    pending = set(requests)
    error: JudgeError | None = None
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for request in done:
            try:
                return request.result()
            except JudgeError as failed:
                # A second request without room says nothing about the first.
                error = failed if error is None or isinstance(error, BusyError) else error
    raise error or BusyError("no request was sent")
