"""One episode: turns of the model, and the answers to them, until it is over or a budget is used up.

Invariants: an episode ends in exactly one result. Its tokens are those that the model was shown and those it sampled,
in order and unchanged; `max_tokens` bounds them all. A broken environment ends it as a failure, never as a reward. A
draft is continued token by token. Where its answers do not come again the episode starts again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rollmesh.generators.agents.chat_template import ChatRenderer, Message
from rollmesh.generators.agents.drivers import BrokenError, Driver, StatefulDriver, StatelessDriver
from rollmesh.generators.agents.transcript import Transcript, split_segments
from rollmesh.generators.agents.turn_requests import TurnRequests
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.types import FinishReason, GenerationRequest, GenerationResult
from rollmesh.generators.rollout.awake_clock import AwakeClock
from rollmesh.generators.rollout.response_source import EpisodeResult, MemberRequest
from rollmesh.mesh.errors import PayloadError, RollmeshError
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.seeds import derived_seed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode.

    Attributes:
        max_turns: turns of the model.
        turn_tokens: tokens of one turn; None: what is left of the response's.
        episode_s: seconds after which it is ended as it is.
    """

    max_turns: int = 8
    turn_tokens: int | None = None
    episode_s: float = 600.0


class _DraftMismatchError(Exception):
    """An environment answers otherwise than it did when a draft was made."""


class Episode:
    """The episode of one member.

    Args:
        request: of the member.
        make_driver: makes a new driver.
        chat: renders.
        turns: samples turns.
        limits: see `EpisodeLimits`.
        clock: for its time.

    Attributes:
        started: monotonic time.
        turn_id: request id of the turn that is being sampled; empty between turns.
        restarted: its draft could not be continued.
    """

    def __init__(
        self,
        request: MemberRequest,
        make_driver: Callable[[MemberRequest], Driver],
        chat: ChatRenderer,
        turns: TurnRequests,
        limits: EpisodeLimits,
        clock: AwakeClock,
    ) -> None:
        self._request = request
        self._make_driver = make_driver
        self._chat = chat
        self._turns = turns
        self._limits = limits
        self._clock = clock
        self._driver = make_driver(request)
        self._messages: list[Message] = _prompt_messages(request)
        self._partial: Trajectory | None = None
        self._pending: asyncio.Future[GenerationResult] | None = None
        self._count = 0
        # For each answer the turns up to it.
        self._answered: list[int] = []
        self.transcript = Transcript(request.prompt_ids)
        self.started = time.monotonic()
        self.turn_id = ""
        self.restarted = False

    async def run(self) -> EpisodeResult:
        """Runs it to its end; where it is cancelled, the result has the tokens so far."""
        reason: FinishReason
        try:
            reason, failure = await self._play_within_time()
            if reason == "length" and not self.transcript.turns:
                failure = "not a token was sampled before the time or the budget was used up"
            rewards = None if failure or reason == "aborted" else await self._driver.rewards()
        except BrokenError as error:
            reason, failure, rewards = "stop", str(error), None
        except asyncio.CancelledError:
            reason, failure, rewards = "aborted", "", None
        finally:
            self._turns.forget(self.turn_id)
            # However it has ended, no environment is left open.
            closed = await self._close()
        return self._result(reason if closed else "aborted", failure, rewards)

    async def _close(self) -> bool:
        """Closes the environment; False where that was cancelled."""
        try:
            await self._driver.close()
        except asyncio.CancelledError:
            return False
        return True

    async def _play_within_time(self) -> tuple[FinishReason, str]:
        try:
            try:
                async with self._clock.timeout(self._limits.episode_s):
                    return await self._play()
            except TimeoutError:
                if self.turn_id:
                    result = await self._abort_turn()
                    self.transcript.add_turn(result.sampled, result.side)
                return "length", ""
        except EngineError as error:
            log.info("an episode is released: %s", error)
            return "aborted", ""
        except RollmeshError as error:
            return "stop", f"generation refused: {error}"

    async def _play(self) -> tuple[FinishReason, str]:
        prefix = self._request.prefix
        if prefix is None:
            await self._open()
        else:
            try:
                ended = await self._continue_draft(prefix)
                if ended is not None:
                    return ended, ""
            except (_DraftMismatchError, PayloadError) as error:
                await self._restart(error)
        while True:
            ended = await self._run_turn()
            if ended is not None:
                return ended, ""

    async def _open(self) -> None:
        if isinstance(self._driver, StatefulDriver):
            self._add_observation(await self._driver.begin())

    def _add_observation(self, observation: str) -> None:
        """Adds the first observation, which continues the prompt's last message."""
        self.transcript.add_masked(self._chat.render_opening(observation))
        if not self._messages or self._messages[-1].get("role") != "user":
            self._messages.append({"role": "user", "content": ""})
        last = self._messages[-1]
        self._messages[-1] = {**last, "content": str(last.get("content", "")) + observation}

    async def _run_turn(self) -> FinishReason | None:
        """Runs one turn and its answer; returns why the episode is over, if it is."""
        left = self._request.sampling.max_tokens - self.transcript.length
        if left <= 0:
            return "length"
        budget = left if self._limits.turn_tokens is None else min(left, self._limits.turn_tokens)
        result = await self._sample(budget)
        if result.finish_reason == "aborted":
            self.transcript.add_turn(result.sampled, result.side)
            return "aborted"
        return await self._answer(result, budget=budget, left=left)

    async def _answer(self, result: GenerationResult, *, budget: int, left: int) -> FinishReason | None:
        self.transcript.add_turn(result.sampled, result.side)
        self._count += 1
        ids = result.sampled.response_ids.tolist()
        cut = result.finish_reason == "length"
        if cut and (len(ids) >= left or len(ids) < budget):
            # The response's budget, or the model's context, is used up.
            self._messages.append({"role": "assistant", "content": self._chat.plain_text(ids)})
            return "length"
        last = self._count >= self._limits.max_turns
        answer = await self._driver.answer(ids, last=last)
        self._answered.append(len(self.transcript.turns))
        self._messages.append(answer.assistant)
        if answer.ended_by is not None:
            # A turn that was cut might have continued with a call.
            return "length" if cut and answer.ended_by == "turn" else "stop"
        if last:
            return "length"
        between = self._chat.after_turn(ids, answer.messages)
        if self.transcript.length + len(between) >= self._request.sampling.max_tokens:
            return "length"
        self._messages.extend(answer.messages)
        self.transcript.add_masked(between)
        return None

    async def _sample(self, budget: int, prefix: Trajectory | None = None) -> GenerationResult:
        sampling = self._request.sampling
        seed = derived_seed(sampling.seed, self._count) if sampling.seed else 0
        self.turn_id = self._turns.new_id()
        request = GenerationRequest(
            request_id=self.turn_id,
            prompt_ids=self.transcript.context,
            sampling=replace(sampling, max_tokens=budget, seed=seed),
            pinned=self._request.pinned,
            prefix=prefix,
            images=self._request.images,
            earlier=self.transcript.length,
        )
        self._partial = prefix
        # Shielded: where time is up, the tokens of the turn are used still.
        self._pending = self._turns.submit(request)
        result = await asyncio.shield(self._pending)
        self.turn_id, self._partial = "", None
        return result

    async def _abort_turn(self) -> GenerationResult:
        """Aborts the turn that is being sampled; returns its tokens."""
        assert self._pending is not None, "a turn is under way"
        self._turns.abort(self.turn_id)
        result = await self._pending
        self.turn_id, self._partial = "", None
        return result

    # ---------------------------------------------------------------------------------------------------- drafts

    async def _continue_draft(self, prefix: Trajectory) -> FinishReason | None:
        """Replays the turns of a draft up to its last, which is continued."""
        segments = split_segments(prefix)
        if isinstance(self._driver, StatefulDriver):
            observation = await self._driver.begin()
            if segments[0][0] or segments[0][1].response_ids.tolist() != self._chat.render_opening(observation):
                raise _DraftMismatchError("its environment begins otherwise")
            self._add_observation(observation)
            segments = segments[1:]
        while segments:
            sampled, tokens = segments.pop(0)
            if not sampled:
                raise _DraftMismatchError("its mask has no turn where one belongs")
            if not segments:
                return await self._finish_turn(tokens)
            await self._replay_turn(tokens, segments.pop(0)[1])
        return None

    async def _finish_turn(self, tokens: Trajectory) -> FinishReason | None:
        left = self._request.sampling.max_tokens - self.transcript.length
        budget = left if self._limits.turn_tokens is None else min(left, self._limits.turn_tokens)
        if len(tokens) > budget:
            raise _DraftMismatchError("it has more tokens than the budget")
        result = await self._sample(budget, tokens)
        if result.finish_reason == "aborted":
            self.transcript.add_turn(result.sampled, result.side)
            return "aborted"
        return await self._answer(result, budget=budget, left=left)

    async def _replay_turn(self, turn: Trajectory, between: Trajectory) -> None:
        """Replays a complete turn of a draft, and the answer to it."""
        ids, answered = turn.response_ids.tolist(), between.response_ids.tolist()
        self._count += 1
        if isinstance(self._driver, StatelessDriver):
            answer = self._driver.recall(ids, answered)
        else:
            answer = await self._driver.answer(ids, last=False)
            if answer.ended_by is not None or self._chat.after_turn(ids, answer.messages) != answered:
                raise _DraftMismatchError(f"its environment answers turn {self._count} otherwise")
        self.transcript.add_turn(turn)
        self._answered.append(len(self.transcript.turns))
        self.transcript.add_masked(answered)
        self._messages.extend((answer.assistant, *answer.messages))

    async def _restart(self, why: Exception) -> None:
        task = self._request.task.task_id
        log.warning("the episode of member %d of task %s starts again: %s", self._request.member, task, why)
        self._turns.forget(self.turn_id)
        await self._driver.close()
        self._driver = self._make_driver(self._request)
        self._messages = _prompt_messages(self._request)
        self.transcript, self._count, self._answered = Transcript(self._request.prompt_ids), 0, []
        self.turn_id, self._partial, self.restarted = "", None, True
        await self._open()

    # --------------------------------------------------------------------------------------------------- results

    def progress(self, running: Trajectory | None) -> Trajectory | None:
        """Tokens so far, with those of the turn that is being sampled (as the engine has them)."""
        return self.transcript.sampled(running if running is not None else self._partial)

    def _result(self, reason: FinishReason, failure: str, rewards: Any) -> EpisodeResult:
        sampled = self.progress(None)
        counts = self._driver.counts
        turns = self.transcript.turns
        return EpisodeResult(
            request_id=self._request.request_id,
            sampled=Trajectory.empty() if sampled is None else sampled,
            finish_reason=reason,
            side=self.transcript.side(),
            rewards=rewards,
            step_rewards=() if rewards is None else self._step_rewards(),
            failure=failure,
            stats={
                "turns": len(turns),
                "tool_calls": counts.tool_calls,
                "tool_errors": counts.tool_errors,
                "tool_timeouts": counts.tool_timeouts,
                "tool_seconds": counts.tool_seconds,
            },
            final_text=self._chat.plain_text(turns[-1].response_ids.tolist()) if turns else "",
            messages=tuple(self._messages),
            tool_calls=tuple(counts.ended),
        )

    def _step_rewards(self) -> list[float]:
        """The environment's rewards by turn; empty where there are none."""
        rewards = self._driver.step_rewards()
        by_turn = [0.0] * (len(self.transcript.turns) if rewards else 0)
        # An action without a token is no turn: its reward is that of the turn before it.
        for turns, reward in zip(self._answered, rewards, strict=False):
            by_turn[max(0, turns - 1)] += reward
        return by_turn


def _prompt_messages(request: MemberRequest) -> list[Message]:
    task = request.task
    if task.messages_json:
        messages: list[Message] = json.loads(task.messages_json)
        return messages
    return [{"role": "user", "content": task.prompt_text}]
