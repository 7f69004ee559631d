"""The answers to one request, while they come: pieces of text, and what each says in the end.

Invariants: an answer of a session is recorded before its end is told to the client; a long answer is read in a thread.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.generators.engines.interface import (
    GenerationRequest,
    GenerationResult,
    TokenEvent,
)
from rollmesh.generators.openai_server.chat_codec import ChatCodec
from rollmesh.generators.openai_server.conversation_keys import Story, extended, message_symbol, text_symbols
from rollmesh.generators.openai_server.errors import ApiError, not_ready
from rollmesh.generators.openai_server.incremental_text import IncrementalDetokenizer, whole_text
from rollmesh.generators.openai_server.messages import Message, normal
from rollmesh.generators.openai_server.prefix_index import Totals
from rollmesh.generators.openai_server.requests import ChatRequest, TextRequest
from rollmesh.generators.openai_server.sessions import Running, Session
from rollmesh.generators.openai_server.turn_tree import Place
from rollmesh.generators.openai_server.worker_threads import Workers
from rollmesh.mesh.trajectory.payload_codec import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class TextDelta:
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
class Prompt:
    """What an answer follows.

    Attributes:
        ids: tokens.
        messages: that they are made of; none: of a text, or given as they are.
        place, told, known: of a session: see `Record`, the totals of its story (`stories`; None: tokens were given),
            and the recorded answer to it, whole or its beginning.
    """

    ids: Sequence[int]
    messages: tuple[Message, ...] = ()
    place: Place | None = None
    told: Totals | None = None
    known: Trajectory | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Said:
    """What an answer's tokens say: all of it, up to a stop string, in OpenAI's form, and as its session records it."""

    whole: str
    text: str
    message: Message
    reason: str
    story: Story | None = None
    messages: tuple[Message, ...] = ()


class CompletionCall:
    """The answers to one request, as they come.

    Attributes:
        session: of the caller; None: nothing is recorded.
        requests: to the engine.
        running: by the name of each.
        complete: all of them are there.
    """

    def __init__(
        self,
        request: ChatRequest | TextRequest,
        session: Session | None,
        language: ChatCodec,
        workers: Workers,
        requests: Sequence[GenerationRequest],
        running: dict[str, Running],
        prompts: Sequence[Prompt],
    ) -> None:
        self._request = request
        self._language = language
        self._workers = workers
        self._by_name = {request.request_id: request for request in requests}
        self._prompts = prompts
        self._texts = {
            name: IncrementalDetokenizer(language.decode, found.sampling.stop) for name, found in self._by_name.items()
        }
        self._open = set(self._by_name)
        self._queue: Any = None
        self.session = session
        self.requests = requests
        self.running = running

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

    def connect(self, queue: Any) -> None:
        """Names where events and results come from."""
        self._queue = queue

    async def pieces(self) -> AsyncIterator[TextDelta | Finished]:
        """Pieces where the request streams, and each answer's end.

        Raises:
            ApiError: the engine refused an answer, or gave up on it.
        """
        for name, request in self._by_name.items():
            # The engine tells of new tokens alone.
            if request.prefix is not None and request.stream:
                yield await self._piece(name, request.prefix)
        while self._open:
            event = await self._queue.get()
            if isinstance(event, TokenEvent):
                yield await self._piece(event.request_id, event.sampled)
            else:
                self._open.discard(event.request_id)
                yield await self._finish(event)

    async def _piece(self, name: str, sampled: Trajectory) -> TextDelta:
        ids, growing = sampled.response_ids.tolist(), self._texts[name]
        text = await self._workers.run(growing.pending + len(ids), growing.add, ids)
        return TextDelta(self.running[name].choice, text, ids, sampled.log_probs.tolist())

    async def _finish(self, result: GenerationResult) -> Finished:
        running = self.running[result.request_id]
        if result.refusal:
            raise ApiError(400, result.refusal)
        if not len(result.sampled):
            raise not_ready("the answer was given up before its first token")
        prompt = self._prompts[running.choice // self._request.choices]
        said = await self._workers.run(len(result.sampled), self._said, result, prompt)
        if self.session is not None and running.place is not None:
            self.session.record.add(
                running.call,
                running.choice,
                running.place,
                result.sampled,
                result.finish_reason,
                story=said.story,
                messages=said.messages,
                said=said.whole,
            )
        return Finished(running.choice, prompt.ids, result, said.text, said.message, said.reason)

    def _said(self, result: GenerationResult, prompt: Prompt) -> _Said:
        """What an answer says; in any thread."""
        ids = result.sampled.response_ids.tolist()
        whole = self._language.decode(ids)
        text = whole_text(whole, self._by_name[result.request_id].sampling.stop)
        reason = "stop" if result.finish_reason == "stop" else "length"
        if not isinstance(self._request, ChatRequest):
            message: Message = {"role": "assistant", "content": text}
            # Every text begins with an empty one.
            tells = prompt.told is not None and len(prompt.told) + len(text) > 2
            story = extended(prompt.told, text_symbols(text)) if tells and prompt.told is not None else None
            return _Said(whole, text, message, reason, story)
        message = self._message(ids, text, self._request.offered_tools)
        reason = "tool_calls" if "tool_calls" in message and reason == "stop" else reason
        if prompt.told is None:
            return _Said(whole, text, message, reason)
        answer = normal(message)
        story = extended(prompt.told, [message_symbol(answer)])
        return _Said(whole, text, message, reason, story, (*prompt.messages, answer))

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
