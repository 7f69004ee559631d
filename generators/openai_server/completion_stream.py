"""The answers to one request, as they come: pieces of text, and the whole answer at the end.

Invariants: an answer of a session is recorded before its end is sent to the client; a long answer is read in a thread.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.generators.engines.types import GenerationRequest, GenerationResult, TokenEvent
from rollmesh.generators.openai_server.chat_codec import ChatCodec
from rollmesh.generators.openai_server.conversations.conversation_keys import (
    ConversationKey,
    extend_key,
    text_symbols,
)
from rollmesh.generators.openai_server.conversations.known_answers import AnswerPlace
from rollmesh.generators.openai_server.conversations.messages import Message, normalize
from rollmesh.generators.openai_server.conversations.prefix_index import Totals
from rollmesh.generators.openai_server.conversations.sessions import RunningAnswer, Session
from rollmesh.generators.openai_server.conversations.turn_tree import PromptPosition
from rollmesh.generators.openai_server.errors import ApiError, not_ready
from rollmesh.generators.openai_server.incremental_text import IncrementalDetokenizer, whole_text
from rollmesh.generators.openai_server.requests import ChatRequest, TextRequest
from rollmesh.generators.openai_server.worker_threads import Workers
from rollmesh.mesh.trajectory.payload_codec import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class TextDelta:
    """New text and tokens since the last piece of an answer."""

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
        message: of a chat: the model's message, in OpenAI's form.
        finish_reason: one of OpenAI's.
    """

    choice: int
    prompt_ids: Sequence[int]
    result: GenerationResult
    text: str
    message: Message
    finish_reason: str


@dataclass(frozen=True, slots=True, eq=False)
class CompletionPrompt:
    """The prompt of an answer.

    Attributes:
        ids: tokens.
        messages: that they are made of; none: of a text, or given as they are.
        position: of a session: see `TurnTree`.
        text_totals: of a text in a session (`conversation_keys`).
        conversation: of a chat in a session: the digest of its messages (`known_answers`); None: of no chat.
        tools: of a chat: those that the prompt shows.
        grammar: that the answer has to be of; empty: any.
        replay: of a session: the recorded answer to this prompt, whole or its beginning.
    """

    ids: Sequence[int]
    messages: tuple[Message, ...] = ()
    position: PromptPosition | None = None
    text_totals: Totals | None = None
    conversation: bytes | None = None
    tools: Sequence[Any] = ()
    grammar: str = ""
    replay: Trajectory | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _ReadAnswer:
    """An answer's text: all of it, up to a stop string, in OpenAI's form, and as its session records it."""

    decoded: str
    text: str
    message: Message
    reason: str
    key: ConversationKey | None = None
    place: AnswerPlace | None = None
    messages: tuple[Message, ...] = ()


class CompletionCall:
    """The answers to one request, as they come.

    Args:
        request: of the client.
        session: see there.
        codec: of the model.
        workers: read long answers.
        requests: see there; one for each answer.
        running: see there.
        prompts: each for as many successive answers as the client wants of it.

    Attributes:
        session: of the caller; None: nothing is recorded.
        requests: to the engine.
        running: by the name of each.
        is_complete: all of them are there.
    """

    def __init__(
        self,
        request: ChatRequest | TextRequest,
        session: Session | None,
        codec: ChatCodec,
        workers: Workers,
        requests: Sequence[GenerationRequest],
        running: dict[str, RunningAnswer],
        prompts: Sequence[CompletionPrompt],
    ) -> None:
        self._request = request
        self._codec = codec
        self._workers = workers
        self._by_name = {request.request_id: request for request in requests}
        self._prompts = prompts
        self._texts = {
            name: IncrementalDetokenizer(codec.decode, found.sampling.stop) for name, found in self._by_name.items()
        }
        self._open = set(self._by_name)
        self._queue: Any = None
        self.session = session
        self.requests = requests
        self.running = running

    @property
    def is_complete(self) -> bool:
        return not self._open

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.ids) for prompt in self._prompts)

    def prompt_ids(self, choice: int) -> Sequence[int]:
        """The prompt's tokens of one answer."""
        return self._prompts[choice // self._request.choices].ids

    def connect(self, queue: Any) -> None:
        """Names the queue of events and results."""
        self._queue = queue

    async def pieces(self) -> AsyncIterator[TextDelta | Finished]:
        """Pieces where the request streams, and each answer's end.

        Raises:
            ApiError: the engine refused an answer, or abandoned it.
        """
        for name, request in self._by_name.items():
            # The engine streams new tokens alone.
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
        ids, detokenizer = sampled.response_ids.tolist(), self._texts[name]
        text = await self._workers.run(detokenizer.pending + len(ids), detokenizer.add, ids)
        return TextDelta(self.running[name].choice, text, ids, sampled.log_probs.tolist())

    async def _finish(self, result: GenerationResult) -> Finished:
        running = self.running[result.request_id]
        if result.refusal:
            raise ApiError(400, result.refusal)
        if not len(result.sampled):
            raise not_ready("the answer was given up before its first token")
        prompt = self._prompts[running.choice // self._request.choices]
        answer = await self._workers.run(len(result.sampled), self._read_answer, result, prompt)
        if self.session is not None and running.position is not None:
            self.session.record.add(
                running.call,
                running.choice,
                running.position,
                result.sampled,
                result.finish_reason,
                key=answer.key,
                place=answer.place,
                messages=answer.messages,
                text=answer.decoded,
            )
        return Finished(running.choice, prompt.ids, result, answer.text, answer.message, answer.reason)

    def _read_answer(self, result: GenerationResult, prompt: CompletionPrompt) -> _ReadAnswer:
        """Reads an answer's text; in any thread."""
        ids = result.sampled.response_ids.tolist()
        decoded = self._codec.decode(ids)
        text = whole_text(decoded, self._by_name[result.request_id].sampling.stop)
        reason = "stop" if result.finish_reason == "stop" else "length"
        if not isinstance(self._request, ChatRequest):
            message: Message = {"role": "assistant", "content": text}
            # Every text begins with an empty one.
            before = prompt.text_totals
            key = extend_key(before, text_symbols(text)) if before is not None and len(before) + len(text) > 2 else None
            return _ReadAnswer(decoded, text, message, reason, key)
        message = self._message(ids, text, self._request.callable_tools, prompt)
        reason = "tool_calls" if "tool_calls" in message and reason == "stop" else reason
        if prompt.conversation is None:
            return _ReadAnswer(decoded, text, message, reason)
        answer = normalize(message)
        cut, stops = len(text) < len(decoded), self._request.stops
        told = decoded if cut or stops else ""
        place = AnswerPlace.of(prompt.conversation, answer, prompt.tools, told, () if cut else stops)
        return _ReadAnswer(decoded, text, message, reason, place=place, messages=(*prompt.messages, answer))

    def _message(self, ids: Sequence[int], text: str, tools: Sequence[Any], prompt: CompletionPrompt) -> Message:
        if not tools:
            return {"role": "assistant", "content": text}
        parsed = self._codec.answer(ids, text, tools, prompt=prompt.ids)
        calls = parsed.calls
        assert isinstance(self._request, ChatRequest)
        if self._request.parallel_tool_calls is False:
            calls = calls[:1]
        message: Message = {"role": "assistant", "content": parsed.content if parsed.content or not calls else None}
        if calls:
            message["tool_calls"] = [_tool_call(name, arguments) for name, arguments in calls]
        return message


def _tool_call(name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": name, "arguments": text}}
