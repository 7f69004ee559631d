"""From a request to its answers: prompts, requests to the engine, what came of them.

Invariants: a prompt that goes on from an answer of its session holds that answer's tokens as they were sampled; every
answer of a session is recorded before the client learns its end; a call that its client leaves is aborted.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from generators.endpoint.engine_calls import EngineCalls
from generators.endpoint.failures import INVALID, ApiError, not_ready, overloaded, too_long
from generators.endpoint.growing import GrowingText, whole_text
from generators.endpoint.language import Language
from generators.endpoint.messages import Message, normal
from generators.endpoint.record import tools_key
from generators.endpoint.requests import ChatRequest, TextRequest
from generators.endpoint.sessions import Running, Session, first_tokens
from generators.engines.base import (
    GenerationRequest,
    GenerationResult,
    InferenceEngine,
    SampledTokens,
    SamplingParams,
    TokenEvent,
)
from mesh.errors import PayloadError


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What was sampled since the last piece of an answer."""

    choice: int
    text: str
    ids: Sequence[int]
    log_probs: Sequence[float]


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A whole answer.

    Attributes:
        choice: its number.
        prompt_ids, result: its tokens.
        text: of a text completion: all of it.
        message: of a chat: what the model said, in OpenAI's form.
        finish_reason: in OpenAI's words.
    """

    choice: int
    prompt_ids: Sequence[int]
    result: GenerationResult
    text: str
    message: Message
    finish_reason: str


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """Token ids, and what they are made of: messages (a chat) or text (else)."""

    ids: tuple[int, ...]
    messages: tuple[Message, ...] = ()
    text: str | None = None


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
        self, engine: InferenceEngine, calls: EngineCalls, language: Language, *, context: int, most: int
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._context = context
        self._most = most
        self.language = language

    @asynccontextmanager
    async def begin(self, request: ChatRequest | TextRequest, session: Session | None) -> AsyncIterator[Answering]:
        """Puts a request to the engine; it is aborted where the caller leaves early.

        Raises:
            ApiError: it cannot be answered.
        """
        training = session is not None and session.rules is not None
        if self._engine.status().serving is None:
            raise not_ready("there are no weights yet: is a learner running?")
        prompts = self._prompts(request, session)
        wanted = len(prompts) * request.choices
        if not training and self._calls.running + wanted > self._most:
            raise overloaded(f"{self._calls.running} answers are being sampled already, at most {self._most} at once")
        call = session.next_call() if session is not None else 0
        requests, running = [], {}
        for choice in range(wanted):
            prompt = prompts[choice // request.choices]
            found = self._request(request, session, call, choice, prompt)
            requests.append(found)
            running[found.request_id] = Running(call, choice, prompt.ids)
        answering = Answering(request, session, self.language, requests, running, prompts)
        try:
            async with self._calls.open(requests) as queue:
                if session is None:
                    yield answering.fed_by(queue)
                else:
                    with session.sampling(running):
                        yield answering.fed_by(queue)
        except PayloadError as error:
            raise ApiError(400, error.message, reason="invalid_prompt", kind=INVALID) from error
        finally:
            if session is not None and not answering.complete:
                session.counts["aborted"] += 1

    def abort(self, session: Session) -> None:
        """Ends early what is being sampled in a session; its clients get what there is."""
        self._calls.abort(list(session.running))

    # ------------------------------------------------------------------------------------------------- prompts

    def _prompts(self, request: ChatRequest | TextRequest, session: Session | None) -> list[_Prompt]:
        if isinstance(request, ChatRequest):
            return [self._chat(request, session)]
        if session is not None and len(request.prompts) > 1:
            raise ApiError(400, "in a session there is one prompt per call", param="prompt")
        return [self._text(prompt, session) for prompt in request.prompts]

    def _chat(self, request: ChatRequest, session: Session | None) -> _Prompt:
        messages = tuple(normal(message, index) for index, message in enumerate(request.messages))
        tools = request.offered_tools
        if tools:
            self.language.check_tools(tools)
        turn = session.record.extended_by(messages, tools_key(tools)) if session is not None else None
        if turn is not None:
            said = len(turn.messages)
            more = self.language.goes_on(turn.sampled.response_ids.tolist(), messages[said:], tools)
            if more is not None:
                return _Prompt((*turn.ids, *more), messages)
        return _Prompt(tuple(self.language.prompt(messages, tools)), messages)

    def _text(self, prompt: str | list[int], session: Session | None) -> _Prompt:
        if not isinstance(prompt, str):
            return _Prompt(tuple(prompt))
        turn = session.record.extended_by_text(prompt) if session is not None else None
        if turn is not None and turn.text is not None:
            more = prompt[len(turn.text) :]
            return _Prompt((*turn.ids, *(self.language.encode_more(more) if more else ())), text=prompt)
        return _Prompt(tuple(self.language.encode(prompt)), text=prompt)

    # ------------------------------------------------------------------------------------------------ requests

    def _request(
        self, request: ChatRequest | TextRequest, session: Session | None, call: int, choice: int, prompt: _Prompt
    ) -> GenerationRequest:
        rules = session.rules if session is not None else None
        limit = rules.limit if rules is not None else self._context
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        room = limit - len(prompt.ids)
        if room < 1:
            if session is not None:
                session.counts["no_room"] += 1
            raise too_long(len(prompt.ids), limit, param)
        if not prompt.ids:
            raise ApiError(400, "the prompt is empty", param=param)
        max_tokens = min(room, request.token_limit or room)
        prefix = None
        if session is not None and rules is not None:
            sampling = session.sampling_of(call, choice, max_tokens, request.stops)
            if choice == 0 and not rules.pinned and (known := rules.replayed(prompt.ids)) is not None:
                prefix = first_tokens(known, min(len(known), max_tokens))
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


class Answering:
    """The answers to one request, as they come.

    Attributes:
        complete: all of them are there.
    """

    def __init__(
        self,
        request: ChatRequest | TextRequest,
        session: Session | None,
        language: Language,
        requests: Sequence[GenerationRequest],
        running: dict[str, Running],
        prompts: Sequence[_Prompt],
    ) -> None:
        self._request = request
        self._session = session
        self._language = language
        self._requests = {request.request_id: request for request in requests}
        self._running = running
        self._prompts = prompts
        self._texts = {
            name: GrowingText(language.decode, found.sampling.stop) for name, found in self._requests.items()
        }
        self._open = set(self._requests)
        self._queue: Any = None

    @property
    def complete(self) -> bool:
        return not self._open

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.ids) for prompt in self._prompts)

    def prompt_ids(self, choice: int) -> Sequence[int]:
        """Of one answer."""
        return self._prompts[choice // self._request.choices].ids

    def fed_by(self, queue: Any) -> Answering:
        """Names where events and results come from."""
        self._queue = queue
        return self

    async def pieces(self) -> AsyncIterator[Piece | Finished]:
        """Pieces where the request streams, and each answer's end.

        Raises:
            ApiError: the engine refused an answer, or gave up on it.
        """
        for name, request in self._requests.items():
            # The engine tells of new tokens alone.
            if request.prefix is not None and request.stream:
                yield self._piece(name, request.prefix)
        while self._open:
            event = await self._queue.get()
            if isinstance(event, TokenEvent):
                yield self._piece(event.request_id, event.sampled)
            else:
                self._open.discard(event.request_id)
                yield self._finish(event)

    def _piece(self, name: str, sampled: SampledTokens) -> Piece:
        ids = sampled.response_ids.tolist()
        return Piece(self._running[name].choice, self._texts[name].add(ids), ids, sampled.log_probs.tolist())

    def _finish(self, result: GenerationResult) -> Finished:
        running = self._running[result.request_id]
        if result.refusal:
            raise ApiError(400, result.refusal)
        if not len(result.response_ids):
            raise not_ready("the answer was given up before its first token")
        prompt = self._prompts[running.choice // self._request.choices]
        request = self._requests[result.request_id]
        ids = result.response_ids.tolist()
        text = whole_text(self._language.decode(ids), request.sampling.stop)
        reason = "stop" if result.finish_reason == "stop" else "length"
        message: Message = {"role": "assistant", "content": text}
        tools: list[Any] = []
        if isinstance(self._request, ChatRequest):
            tools = self._request.offered_tools
            message = self._message(ids, text, tools)
            reason = "tool_calls" if "tool_calls" in message and reason == "stop" else reason
        if self._session is not None:
            self._session.record.add(
                running.call,
                running.choice,
                prompt.ids,
                result,
                result.finish_reason,
                messages=(*prompt.messages, normal(message)) if prompt.messages else (),
                tools=tools_key(tools),
                text=None if prompt.text is None else prompt.text + text,
            )
        return Finished(running.choice, prompt.ids, result, text, message, reason)

    def _message(self, ids: Sequence[int], text: str, tools: Sequence[Any]) -> Message:
        if not tools:
            return {"role": "assistant", "content": text}
        found = self._language.answer(ids, text, tools)
        calls = found.calls
        assert isinstance(self._request, ChatRequest)
        if self._request.parallel_tool_calls is False:
            calls = calls[:1]
        message: Message = {"role": "assistant", "content": found.content if found.content or not calls else None}
        if calls:
            message["tool_calls"] = [_tool_call(name, arguments) for name, arguments in calls]
        return message


def _tool_call(name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": text}}
