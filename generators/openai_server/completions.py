"""From a request to the engine: its prompts and how they are sampled.

Invariants: a prompt that continues an answer of its session holds that answer's tokens as they were sampled; a call
that its client leaves is aborted; a long prompt is made in a thread, and one that is far too long is not tokenised.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import TypeVar

from rollmesh.generators.engines.interface import GenerationRequest, InferenceEngine, SamplingParams
from rollmesh.generators.openai_server.chat_codec import ChatCodec, TooLongError
from rollmesh.generators.openai_server.completion_stream import CompletionCall, Prompt
from rollmesh.generators.openai_server.conversation_keys import of_messages, of_text
from rollmesh.generators.openai_server.engine_client import EngineClient
from rollmesh.generators.openai_server.errors import INVALID, ApiError, not_ready, overloaded, too_long
from rollmesh.generators.openai_server.messages import Message, normal
from rollmesh.generators.openai_server.prefix_index import Totals
from rollmesh.generators.openai_server.requests import ChatRequest, TextRequest
from rollmesh.generators.openai_server.sessions import Running, Session
from rollmesh.generators.openai_server.turn_tree import Turn
from rollmesh.generators.openai_server.worker_threads import Workers
from rollmesh.mesh.errors import PayloadError

M = TypeVar("M", list[int], list[int] | None)


class Completions:
    """Answers requests.

    Args:
        engine: samples.
        calls: of the same engine.
        language: of the model.
        context: tokens of prompt and answer at most, outside of training.
        most: answers that may be sampled at once for clients outside of training.
    """

    def __init__(
        self, engine: InferenceEngine, calls: EngineClient, language: ChatCodec, *, context: int, most: int
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._most = most
        self.context = context
        self.language = language

    async def prepared(
        self, request: ChatRequest | TextRequest, session: Session | None, workers: Workers, *, size: int
    ) -> CompletionCall:
        """Makes of a request what the engine takes; to be begun at once.

        Args:
            request: checked.
            session: of the caller; None: nothing is recorded.
            workers: for what is large.
            size: bytes of the request.

        Raises:
            ApiError: it cannot be answered.
        """
        if self._engine.status().serving is None:
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
        # Others may have come meanwhile.
        self._check_room(request, session)
        requests, running = [], {}
        for choice in range(request.answers):
            prompt = prompts[choice // request.choices]
            found = self._request(request, session, call, choice, prompt)
            requests.append(found)
            running[found.request_id] = Running(call, choice, prompt.place)
        return CompletionCall(request, session, self.language, workers, requests, running, prompts)

    @asynccontextmanager
    async def begun(self, answering: CompletionCall) -> AsyncIterator[None]:
        """Puts a request to the engine; it is aborted where the caller leaves early.

        Raises:
            ApiError: the engine does not take it.
        """
        session = answering.session
        try:
            async with self._calls.open(answering.requests) as queue:
                answering.connect(queue)
                with nullcontext() if session is None else session.sampling(answering.running):
                    yield
        except PayloadError as error:
            raise ApiError(400, error.message, reason="invalid_prompt", kind=INVALID) from error
        finally:
            if session is not None and not answering.complete:
                session.counts["aborted"] += 1

    def abort(self, session: Session) -> None:
        """Ends early what is being sampled in a session; its clients get what there is."""
        self._calls.abort(list(session.running))

    def _check_room(self, request: ChatRequest | TextRequest, session: Session | None) -> None:
        if session is not None:
            session.check_room(request.answers, self._limit(session))
            if session.rules is not None:
                return
        if request.answers > self._most:
            raise ApiError(400, f"{request.answers} answers are wanted, at most {self._most} are given to a call")
        if self._calls.running + request.answers > self._most:
            raise overloaded(f"{self._calls.running} answers are being sampled already, at most {self._most} at once")

    def _limit(self, session: Session | None) -> int:
        return self.context if session is None or session.rules is None else session.rules.limit

    # ------------------------------------------------------------------------------------------------- prompts

    def _prompts(self, request: ChatRequest | TextRequest, session: Session | None) -> list[Prompt]:
        """The prompts of a request; in any thread.

        Raises:
            ApiError: they cannot be made.
            TooLongError: one leaves no room for an answer.
        """
        limit = self._limit(session)
        try:
            if isinstance(request, ChatRequest):
                prompts = [self._chat(request, session, limit)]
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

    def _chat(self, request: ChatRequest, session: Session | None, limit: int) -> Prompt:
        messages = tuple(normal(message, index) for index, message in enumerate(request.messages))
        tools = request.offered_tools
        if tools:
            self.language.check_tools(tools)
        if session is None:
            return Prompt(self.language.prompt(messages, tools, limit), messages)
        told = of_messages(messages, tools)
        found = session.record.extended_by(told[:-1])
        if found is not None:
            said, turn = found
            answer = turn.sampled.response_ids.tolist()
            more = _following(turn, limit, partial(self.language.goes_on, answer, messages[said - 1 :], tools))
            if more is not None:
                return _in_session(session, turn, more, messages, told)
        return _in_session(session, None, self.language.prompt(messages, tools, limit), messages, told)

    def _text(self, prompt: str | list[int], session: Session | None, limit: int) -> Prompt:
        if session is None:
            return Prompt(self.language.encode(prompt, limit) if isinstance(prompt, str) else prompt)
        if not isinstance(prompt, str):
            return _in_session(session, None, prompt)
        told = of_text(prompt)
        found = session.record.extended_by(told)
        if found is None:
            return _in_session(session, None, self.language.encode(prompt, limit), told=told)
        said, turn = found
        more = prompt[said - 1 :]
        new_ids = _following(turn, limit, partial(self.language.encode_more, more)) if more else []
        return _in_session(session, turn, new_ids, told=told)

    # ------------------------------------------------------------------------------------------------ requests

    def _request(
        self, request: ChatRequest | TextRequest, session: Session | None, call: int, choice: int, prompt: Prompt
    ) -> GenerationRequest:
        rules = session.rules if session is not None else None
        room = self._limit(session) - len(prompt.ids)
        max_tokens = min(room, request.token_limit or room)
        prefix = None
        if session is not None and rules is not None:
            sampling = session.sampling_of(call, choice, max_tokens, request.stops)
            if choice == 0 and not rules.pinned and prompt.known is not None:
                prefix = prompt.known.part(0, min(len(prompt.known), max_tokens))
        else:
            sampling = _as_asked(request, choice, max_tokens)
        return GenerationRequest(
            request_id=self._calls.new_id(),
            prompt_ids=prompt.ids,
            sampling=sampling,
            pinned=rules is not None and rules.pinned,
            prefix=prefix,
            stream=bool(request.stream),
            outside=rules is None,
        )


def _prompt_field(request: ChatRequest | TextRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def _following(turn: Turn, limit: int, encode: Callable[[int], M]) -> M:
    """What follows a turn, where all of it may have so many tokens."""
    try:
        return encode(max(0, limit - turn.length))
    except TooLongError as error:
        raise TooLongError(turn.length + error.tokens) from error


def _in_session(
    session: Session,
    before: Turn | None,
    more: list[int],
    messages: tuple[Message, ...] = (),
    told: Totals | None = None,
) -> Prompt:
    """A prompt of a session: the tokens of the turn that it continues, and more."""
    ids = more if before is None else [*before.ids().tolist(), *more]
    known = None if session.rules is None else session.rules.replayed(ids)
    return Prompt(ids, messages, session.record.place(before, more), told, known)


def _as_asked(request: ChatRequest | TextRequest, choice: int, max_tokens: int) -> SamplingParams:
    seed = 0 if request.seed is None else (request.seed * 0x9E3779B1 + choice) % (1 << 63) or 1
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=request.top_p or 1.0,
        top_k=max(0, request.top_k or 0),
        max_tokens=max_tokens,
        stop=request.stops,
        seed=seed,
    )
