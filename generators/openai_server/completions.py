"""Turns a request into the engine's: its prompts and sampling parameters.

Invariants: a prompt that continues an answer of its session holds that answer's tokens as they were sampled. A call
that its client leaves is aborted. A long prompt is made in a thread, and one that is far too long is not tokenised.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.types import GenerationRequest, SamplingParams
from rollmesh.generators.openai_server.chat_codec import ChatCodec, TooLongError
from rollmesh.generators.openai_server.completion_stream import CompletionCall, CompletionPrompt
from rollmesh.generators.openai_server.conversations.conversation_keys import totals_of_text
from rollmesh.generators.openai_server.conversations.messages import normalize
from rollmesh.generators.openai_server.conversations.prefix_index import Totals
from rollmesh.generators.openai_server.conversations.sessions import RunningAnswer, Session
from rollmesh.generators.openai_server.conversations.turn_tree import Turn
from rollmesh.generators.openai_server.engine_client import EngineClient
from rollmesh.generators.openai_server.errors import INVALID, ApiError, not_ready, overloaded, too_long
from rollmesh.generators.openai_server.requests import ChatRequest, TextRequest
from rollmesh.generators.openai_server.worker_threads import Workers
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.branches import Cause
from rollmesh.mesh.trajectory.episode_metrics import CALLS_REQUIRED
from rollmesh.mesh.trajectory.seeds import derived_seed

M = TypeVar("M", list[int], list[int] | None)


class Completions:
    """Answers requests.

    Args:
        engine: samples.
        calls: of the same engine.
        codec: of the model.
        context: tokens of prompt and answer at most, outside of training.
        max_running: answers that may be sampled at once for clients outside of training.
    """

    def __init__(
        self, engine: InferenceEngine, calls: EngineClient, codec: ChatCodec, *, context: int, max_running: int
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._max_running = max_running
        self.context = context
        self.codec = codec

    async def prepare(
        self, request: ChatRequest | TextRequest, session: Session | None, workers: Workers, *, size: int
    ) -> CompletionCall:
        """Makes the engine's requests of a client's; to be started at once.

        Args:
            request: checked.
            session: of the caller; None: nothing is recorded.
            workers: for large ones.
            size: bytes of the request.

        Raises:
            ApiError: it cannot be answered.
        """
        status = self._engine.status()
        # Asleep, and on its way back, it has none for a while: calls wait as those that it has begun do.
        if status.serving is None and status.state == "running":
            raise not_ready("there are no weights yet: is a learner running?")
        self._check_room(request, session)
        async with nullcontext() if session is None else session.preparing:
            call = session.next_call() if session is not None else 0
            try:
                prompts = await workers.run(size, self._prompts, request, session)
            except TooLongError as error:
                if session is not None:
                    session.counts["no_room"] += 1
                raise too_long(error.tokens, self._limit(session), _prompt_field(request)) from error
        if session is not None and isinstance(request, ChatRequest) and request.is_constrained:
            session.counts[CALLS_REQUIRED] += 1
        # Others may have come meanwhile.
        self._check_room(request, session)
        requests, running = [], {}
        for choice in range(request.answers):
            prompt = prompts[choice // request.choices]
            generation = self._request(request, session, call, choice, prompt)
            requests.append(generation)
            running[generation.request_id] = RunningAnswer(call, choice, prompt.position)
        return CompletionCall(request, session, self.codec, workers, requests, running, prompts)

    @asynccontextmanager
    async def sampling(self, completion: CompletionCall) -> AsyncIterator[None]:
        """Submits a request to the engine; it is aborted where the caller leaves early.

        Raises:
            ApiError: the engine does not take it.
        """
        session = completion.session
        try:
            async with self._calls.open(completion.requests) as queue:
                completion.connect(queue)
                with nullcontext() if session is None else session.sampling(completion.running):
                    yield
        except PayloadError as error:
            raise ApiError(400, error.message, reason="invalid_prompt", kind=INVALID) from error
        finally:
            if session is not None and not completion.is_complete:
                session.counts["aborted"] += 1

    def abort(self, session: Session) -> None:
        """Ends a session's running requests early; its clients get the tokens so far."""
        self._calls.abort(list(session.running))

    def _check_room(self, request: ChatRequest | TextRequest, session: Session | None) -> None:
        if session is not None:
            session.check_room(request.answers, self._limit(session))
            if session.policy is not None:
                return
        if request.answers > self._max_running:
            raise ApiError(
                400, f"{request.answers} answers are wanted, at most {self._max_running} are given to a call"
            )
        if self._calls.running + request.answers > self._max_running:
            raise overloaded(
                f"{self._calls.running} answers are being sampled already, at most {self._max_running} at once"
            )

    def _limit(self, session: Session | None) -> int:
        return self.context if session is None or session.policy is None else session.policy.limit

    # ------------------------------------------------------------------------------------------------- prompts

    def _prompts(self, request: ChatRequest | TextRequest, session: Session | None) -> list[CompletionPrompt]:
        """The prompts of a request; in any thread.

        Raises:
            ApiError: they cannot be made.
            TooLongError: one leaves no room for an answer.
        """
        limit = self._limit(session)
        try:
            if isinstance(request, ChatRequest):
                prompts = [self._constrained(request, self._chat(request, session, limit))]
            elif session is not None and len(request.prompts) > 1:
                raise ApiError(400, "in a session there is one prompt per call", param="prompt")
            else:
                prompts = [self._text(prompt, session, limit) for prompt in request.prompts]
        except RecursionError as error:
            raise ApiError(400, "messages or tools are nested too deep", param=_prompt_field(request)) from error
        longest = max(len(prompt.ids) for prompt in prompts)
        if longest >= limit:
            raise TooLongError(longest)
        if not all(prompt.ids for prompt in prompts):
            raise ApiError(400, "the prompt is empty", param=_prompt_field(request))
        return prompts

    def _chat(self, request: ChatRequest, session: Session | None, limit: int) -> CompletionPrompt:
        messages = tuple(normalize(message, index) for index, message in enumerate(request.messages))
        tools = request.tools or []
        if request.callable_tools:
            self.codec.check_tools(tools)
        if session is None:
            return CompletionPrompt(self.codec.prompt(messages, tools, limit), messages)
        followed = session.record.follow(messages, tools)
        cause = followed.cause
        if followed.answer is not None:
            turn, place = followed.answer
            if tools and not place.tools:
                cause = Cause.TOOLS
            else:
                answer = turn.sampled.response_ids.tolist()
                new = messages[followed.length :]
                continued = partial(self.codec.continuation, answer, new, place.tools, added=followed.added)
                more = _encode_after(turn, limit, continued)
                if more is not None:
                    session.count_call(cause, tools, place.tools)
                    prompt = _session_prompt(session, turn, more)
                    return replace(prompt, messages=messages, conversation=followed.conversation, tools=place.tools)
                cause = Cause.TEMPLATE
        session.count_call(cause, tools, tools)
        prompt = _session_prompt(session, None, self.codec.prompt(messages, tools, limit))
        return replace(prompt, messages=messages, conversation=followed.conversation, tools=tools)

    def _constrained(self, request: ChatRequest, prompt: CompletionPrompt) -> CompletionPrompt:
        """A prompt with the grammar of its answer, where a call of a tool or JSON is required."""
        if not request.is_constrained:
            return prompt
        forced, many = request.forced_tools, request.many_calls
        if not self._engine.takes_grammars:
            field, can = ("tool_choice", "`auto` or `none`") if forced else ("response_format", "`text`")
            raise ApiError(
                400,
                f"{field} can only be {can}: the engine {self._engine.name} forces no "
                f"{'calls' if forced else 'JSON'}; rollout.engine: hf, vllm and sglang do",
                reason="unsupported_value",
                param=field,
            )
        if forced:
            grammar = self.codec.call_grammar(prompt.ids, forced, many=many)
        else:
            grammar = self.codec.call_grammar(
                prompt.ids, request.callable_tools, many=many, schema=request.answer_schema
            )
        return replace(prompt, grammar=grammar)

    def _text(self, prompt: str | list[int], session: Session | None, limit: int) -> CompletionPrompt:
        if session is None:
            return CompletionPrompt(self.codec.encode(prompt, limit) if isinstance(prompt, str) else prompt)
        if not isinstance(prompt, str):
            return _session_prompt(session, None, prompt)
        text_totals = totals_of_text(prompt)
        match = session.record.longest_known(text_totals)
        if match is None:
            return _session_prompt(session, None, self.codec.encode(prompt, limit), text_totals)
        length, turn = match
        more = prompt[length - 1 :]
        new_ids = _encode_after(turn, limit, partial(self.codec.encode_more, more)) if more else []
        return _session_prompt(session, turn, new_ids, text_totals)

    # ------------------------------------------------------------------------------------------------ requests

    def _request(
        self,
        request: ChatRequest | TextRequest,
        session: Session | None,
        call: int,
        choice: int,
        prompt: CompletionPrompt,
    ) -> GenerationRequest:
        policy = session.policy if session is not None else None
        room = self._limit(session) - len(prompt.ids)
        max_tokens = min(room, request.token_limit or room)
        prefix = None
        if session is not None and policy is not None:
            sampling = session.sampling_of(call, choice, max_tokens, request.stops)
            if choice == 0 and not policy.pinned and prompt.replay is not None:
                prefix = prompt.replay.part(0, min(len(prompt.replay), max_tokens))
        else:
            sampling = _client_sampling(request, choice, max_tokens)
        sampling = replace(sampling, grammar=prompt.grammar)
        whole = bool(prompt.grammar) and not self._engine.resumes_grammars
        return GenerationRequest(
            request_id=self._calls.new_id(),
            prompt_ids=prompt.ids,
            sampling=sampling,
            pinned=policy is not None and policy.pinned,
            prefix=None if whole else prefix,
            stream=bool(request.stream) and not whole,
            outside=policy is None,
        )


def _prompt_field(request: ChatRequest | TextRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def _encode_after(turn: Turn, limit: int, encode: Callable[[int], M]) -> M:
    """Encodes the text after a turn, where both together may have `limit` tokens."""
    try:
        return encode(max(0, limit - turn.length))
    except TooLongError as error:
        raise TooLongError(turn.length + error.tokens) from error


def _session_prompt(
    session: Session, before: Turn | None, more: list[int], text_totals: Totals | None = None
) -> CompletionPrompt:
    """A prompt of a session: the tokens of the turn that it continues, and more."""
    ids = more if before is None else [*before.ids().tolist(), *more]
    replay = None if session.policy is None else session.policy.replay_of(ids)
    position = session.record.locate(before, more)
    return CompletionPrompt(ids, position=position, text_totals=text_totals, replay=replay)


def _client_sampling(request: ChatRequest | TextRequest, choice: int, max_tokens: int) -> SamplingParams:
    seed = 0 if request.seed is None else derived_seed(request.seed, choice)
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=request.top_p or 1.0,
        top_k=max(0, request.top_k or 0),
        max_tokens=max_tokens,
        stop=request.stops,
        seed=seed,
    )
