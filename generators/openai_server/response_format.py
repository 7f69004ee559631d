"""Answers in the form of OpenAI's API."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from rollmesh.generators.openai_server.completion_stream import CompletionCall, Finished, TextDelta
from rollmesh.generators.openai_server.requests import ChatRequest, TextRequest
from rollmesh.mesh.chat.thoughts import pieces_at_marks

_BROKEN = "\N{REPLACEMENT CHARACTER}"
END_OF_STREAM = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


@dataclass(slots=True)
class ResponseFormatter:
    """Formats the answers to one call.

    Args:
        request: of the client.
        token: a token's text.
        model: the served model's name.
    """

    request: ChatRequest | TextRequest
    token: Callable[[int], str]
    model: str
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    _sent_text: dict[int, list[str]] = field(default_factory=dict)
    _started: set[int] = field(default_factory=set)
    _offsets: dict[int, int] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.request, ChatRequest)

    @property
    def holds_text_back(self) -> bool:
        """True where text is sent at the end alone: tool calls may be hidden in it."""
        return isinstance(self.request, ChatRequest) and bool(self.request.callable_tools)

    # ---------------------------------------------------------------------------------------------- in one piece

    def response(self, completion: CompletionCall, answers: Sequence[Finished]) -> dict[str, Any]:
        """The answer to a call that does not stream."""
        choices = []
        for answer in sorted(answers, key=lambda answer: answer.choice):
            result = answer.result
            ids, log_probs = result.sampled.response_ids.tolist(), result.sampled.log_probs.tolist()
            choice: dict[str, Any] = {"index": answer.choice, "finish_reason": answer.finish_reason}
            if self.is_chat:
                choice["message"] = {"refusal": None, **answer.message}
            else:
                choice["text"] = answer.text
            choice["logprobs"] = self._log_probs(answer.choice, ids, log_probs)
            if self.request.return_token_ids:
                choice |= {"prompt_token_ids": list(answer.prompt_ids), "token_ids": ids}
            choices.append(choice)
        newest = max(answer.result.sampled.versions.newest for answer in answers)
        return self._frame(choices, chunk=False) | {
            "system_fingerprint": str(newest),
            "usage": usage(completion, answers),
        }

    # -------------------------------------------------------------------------------------------------- streamed

    def delta_chunks(self, piece: TextDelta, completion: CompletionCall) -> list[dict[str, Any]]:
        """The chunks of a part of an answer."""
        text = "" if self.holds_text_back else piece.text
        chunks = self._opening(piece.choice, completion)
        self._sent_text.setdefault(piece.choice, []).append(text)
        if text or self.request.wants_log_probs or self.request.return_token_ids:
            chunks.append(self._part(piece.choice, text, piece.ids, piece.log_probs))
        return chunks

    def end_chunks(self, answer: Finished, completion: CompletionCall) -> list[dict[str, Any]]:
        """The chunks at the end of an answer: text held back, tool calls, and the finish reason."""
        chunks = self._opening(answer.choice, completion)
        text = (answer.message.get("content") or "") if self.is_chat else answer.text
        spoken = "".join(self._sent_text.get(answer.choice, ()))
        if text.startswith(spoken):
            # Clients find marks of thoughts where each is a piece of its own, as it is when a model writes it.
            chunks += [self._part(answer.choice, piece, (), ()) for piece in pieces_at_marks(text[len(spoken) :])]
        calls = [{"index": index, **call} for index, call in enumerate(answer.message.get("tool_calls", ()))]
        if self.is_chat and calls:
            delta = {"index": answer.choice, "delta": {"tool_calls": calls}, "finish_reason": None}
            chunks.append(self._frame([delta], chunk=True))
        last: dict[str, Any] = {"index": answer.choice, "finish_reason": answer.finish_reason}
        last["delta" if self.is_chat else "text"] = {} if self.is_chat else ""
        frame = self._frame([last], chunk=True)
        return [*chunks, frame | {"system_fingerprint": str(answer.result.sampled.versions.newest)}]

    def usage_chunks(self, completion: CompletionCall, answers: Sequence[Finished]) -> list[dict[str, Any]]:
        """The chunk of the usage, where it was requested."""
        if not self.request.include_usage:
            return []
        return [self._frame([], chunk=True) | {"usage": usage(completion, answers)}]

    def _opening(self, choice: int, completion: CompletionCall) -> list[dict[str, Any]]:
        if choice in self._started:
            return []
        self._started.add(choice)
        first: dict[str, Any] = {"index": choice, "finish_reason": None}
        if self.request.return_token_ids:
            first["prompt_token_ids"] = list(completion.prompt_ids(choice))
        elif not self.is_chat:
            return []
        first |= {"delta": {"role": "assistant", "content": ""}} if self.is_chat else {"text": ""}
        return [self._frame([first], chunk=True)]

    def _part(self, index: int, text: str, ids: Sequence[int], log_probs: Sequence[float]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": None}
        choice |= {"delta": {"content": text}} if self.is_chat else {"text": text}
        if ids:
            choice["logprobs"] = self._log_probs(index, ids, log_probs)
            if self.request.return_token_ids:
                choice["token_ids"] = list(ids)
        return self._frame([choice], chunk=True)

    # ------------------------------------------------------------------------------------------------- the parts

    def _frame(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.is_chat else "text_completion"
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.name}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _log_probs(self, choice: int, ids: Sequence[int], log_probs: Sequence[float]) -> dict[str, Any] | None:
        """Log-probs of tokens after those of the choice that were formatted before."""
        if not self.request.wants_log_probs:
            return None
        tokens = [self.token(token_id) for token_id in ids]
        alternatives = self.request.lists_alternatives
        if not self.is_chat:
            *offsets, self._offsets[choice] = accumulate(map(len, tokens), initial=self._offsets.get(choice, 0))
            listed = [{token: value} for token, value in zip(tokens, log_probs, strict=True)] if alternatives else None
            return {
                "tokens": tokens,
                "token_logprobs": list(log_probs),
                "top_logprobs": listed,
                "text_offset": offsets,
            }
        content = []
        for token, value in zip(tokens, log_probs, strict=True):
            # A token may be part of a character.
            entry = {"token": token, "logprob": value, "bytes": None if _BROKEN in token else list(token.encode())}
            # Only the sampled token's log-prob is known.
            content.append({**entry, "top_logprobs": [entry] if alternatives else []})
        return {"content": content, "refusal": None}


def usage(completion: CompletionCall, answers: Sequence[Finished]) -> dict[str, int]:
    """Tokens of the prompts and of all answers."""
    sampled = sum(len(answer.result.sampled) for answer in answers)
    prompt = completion.prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
