"""Asks one question until there is a verdict: within limits and budget, again after failures, twice where it is slow.

Invariant: each request has been counted by limits and budget before it is sent. None is begun so late that it could not
end in time.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rollmesh.mesh.config.scorers.judge import JudgeSection
from rollmesh.reward_service.judge.accounts import Accounts
from rollmesh.reward_service.judge.budget import UNUSED, Usage
from rollmesh.reward_service.judge.endpoint import Address, Endpoint, Reply, keep_open
from rollmesh.reward_service.judge.errors import (
    AnswerError,
    BusyError,
    JudgeError,
    RefusedError,
    ThrottledError,
    UnavailableError,
)
from rollmesh.reward_service.judge.limits import Turn
from rollmesh.reward_service.judge.retries import backoff_s
from rollmesh.reward_service.judge.slots import Slots
from rollmesh.reward_service.judge.templates import Messages
from rollmesh.reward_service.judge.verdicts import Question, Verdict

# Characters of an answer that its repair shows to the judge, and tokens that a message adds to its text.
_SHOWN = 4000
_MESSAGE_TOKENS = 8
_BYTES_PER_TOKEN = 3
# Seconds after which a request that waits looks at its share of the rates again.
_LOOK_S = 1.0


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
        self._slots = Slots(accounts.most_in_progress)
        self._endpoint = Endpoint(address)
        self._kept = asyncio.create_task(keep_open(self._endpoint))

    async def verdict(self, messages: Messages, vote: int, begin_by: float, paid: list[float]) -> Verdict:
        """A verdict; an answer that is none is shown to the judge once.

        Args:
            messages: the question.
            vote: its number among those of one question.
            begin_by: monotonic time after which no request is begun.
            paid: gets the cost of each request.

        Raises:
            JudgeError: there is none.
        """
        reply = await self._reply(messages, vote, begin_by, paid)
        try:
            return self._read(reply)
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
            return self._read(await self._reply(repair, vote, begin_by, paid))
        except BusyError:
            # The question was answered, and wrongly: to call it not begun would repeat it without end.
            raise wrong from None

    def _read(self, reply: Reply) -> Verdict:
        answers = self._accounts.counts.answers
        try:
            verdict = self._question.read(reply.text)
        except AnswerError:
            answers["wrong"] += 1
            raise
        answers["verdict"] += 1
        return verdict

    async def _reply(self, messages: Messages, vote: int, begin_by: float, paid: list[float]) -> Reply:
        body = self._body(messages, vote)
        estimate = Usage(sum(map(_tokens, messages)), self._section.max_tokens)
        failures = 0
        last: UnavailableError | None = None
        while True:
            try:
                return await self._begin(body, estimate, begin_by, paid)
            except ThrottledError as error:
                if error.retry_after_s is not None:
                    self._accounts.limits.pause(error.retry_after_s, time.monotonic())
                failed: ThrottledError | UnavailableError = error
            except UnavailableError as error:
                failed = last = error
            except BusyError as error:
                self._accounts.counts.waits += 1
                raise (last or error) from None
            failures += 1
            wait_s = max(backoff_s(failures, random.random()), failed.retry_after_s or 0.0)  # noqa: S311 - no secret
            if time.monotonic() + wait_s > begin_by:
                raise last or failed
            await asyncio.sleep(wait_s)

    async def _begin(self, body: Mapping[str, Any], estimate: Usage, begin_by: float, paid: list[float]) -> Reply:
        """One request; a second one where it is slow and there is room."""
        async with self._room(estimate, begin_by, paid) as used:
            slow_s = self._accounts.hedging.begin()
            requests = {asyncio.create_task(self._send(body, used))}
            try:
                done, _ = await asyncio.wait(requests, timeout=slow_s)
                if not done and self._accounts.hedging.take():
                    requests.add(asyncio.create_task(self._send_again(body, estimate, paid)))
                return await _first_answer(requests)
            finally:
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)

    async def _send_again(self, body: Mapping[str, Any], estimate: Usage, paid: list[float]) -> Reply:
        async with self._room(estimate, time.monotonic(), paid) as used:
            self._accounts.counts.hedges += 1
            return await self._send(body, used)

    async def _send(self, body: Mapping[str, Any], used: list[Usage]) -> Reply:
        began = time.monotonic()
        counts = self._accounts.counts
        counts.requests += 1
        try:
            reply = await self._endpoint.ask(body)
        except (ThrottledError, RefusedError) as error:
            counts.answers["throttled" if isinstance(error, ThrottledError) else "refused"] += 1
            used.append(UNUSED)
            raise
        except JudgeError as error:
            counts.answers["wrong" if isinstance(error, AnswerError) else "unavailable"] += 1
            raise
        self._accounts.hedging.answered(time.monotonic() - began)
        if reply.usage is not None:
            used.append(reply.usage)
        return reply

    @asynccontextmanager
    async def _room(self, estimate: Usage, begin_by: float, paid: list[float]) -> AsyncIterator[list[Usage]]:
        """Waits for the turn of a request, and counts it; the block appends its use where that becomes known.

        Raises:
            BusyError: there is no room in time.
            SpentError: the budget is spent.
        """
        limits, now = self._accounts.limits_now(), time.monotonic()
        _check_room(limits.delay_s(estimate.total, now), now, begin_by)
        self._accounts.reserve(estimate)
        turn = limits.take(estimate.total, now)
        used: list[Usage] = []
        begun = False
        try:
            await self._wait(turn, begin_by)
            await self._acquire(begin_by)
            begun = True
            try:
                yield used
            finally:
                self._slots.release()
        finally:
            spent = used[0] if used else estimate if begun else UNUSED
            paid.append(self._accounts.settle(estimate, spent))
            # An endpoint counts a request that it refuses, too.
            limits.take(spent.total - estimate.total, time.monotonic(), requests=0 if begun else -1)

    async def _wait(self, turn: Turn, begin_by: float) -> None:
        began = now = time.monotonic()
        while left_s := max(0.0, self._accounts.limits_now().left_s(turn, now)):
            _check_room(left_s, now, begin_by)
            # The rates may change meanwhile.
            await asyncio.sleep(min(left_s, _LOOK_S))
            now = time.monotonic()
        self._accounts.counts.wait_s += now - began

    async def _acquire(self, begin_by: float) -> None:
        began = time.monotonic()
        try:
            # It may be over already, and a place free: that is taken at once.
            async with asyncio.timeout(max(0.0, begin_by - began)):
                await self._slots.acquire()
        except TimeoutError as error:
            raise BusyError(f"{self._accounts.most_in_progress()} requests are in progress") from error
        finally:
            self._accounts.counts.wait_s += time.monotonic() - began

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


def _check_room(delay_s: float, now: float, begin_by: float) -> None:
    if delay_s > 0.0 and now + delay_s > begin_by:
        if math.isinf(delay_s):
            raise BusyError("other processes that score have all of its limits at present")
        raise BusyError(f"its limits allow the next request in {delay_s:.1f} s")


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
