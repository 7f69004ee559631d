"""Messages between a worker process and its owner: msgpack over a socket pair. Nothing is ever unpickled.

To the worker: first `[[[spec, name], ...], tested, call_timeout_s, log settings]`, then work messages
`[function, [[unit, deadline, [item, ...]], ...]]`, where an item is a serialized ScoreItem.

From the worker: `[READY, [function kind, ...]]` or `[REFUSED, message, hint]`, then messages
`[DONE, [[unit, answer], ...]]`. An answer is what `pack_answer` made, or nil for a unit that was not begun.

Invariant: an answer holds one outcome per item and at most `ANSWER_BYTES`; its numbers are floats, its texts can be
sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from rollmesh.reward_service.outcomes import Failed, Outcome, Scored, SpanValue, Unscorable

READY, REFUSED, DONE = "ready", "refused", "done"
ANSWER_BYTES = 16 << 20
# A message of a worker that is larger is no answer: it is ended.
MESSAGE_BYTES = 64 << 20
_SCORED, _UNSCORABLE, _FAILED = 0, 1, 2


def pack_answer(outcomes: Sequence[Outcome]) -> bytes:
    """The outcomes of a unit as bytes."""
    packed: bytes = msgpack.packb([_packed(outcome) for outcome in outcomes])
    if len(packed) > ANSWER_BYTES:
        return pack_answer([Failed("bad_output", f"{len(packed)} bytes of results")] * len(outcomes))
    return packed


def unpack_answer(packed: bytes) -> list[Outcome]:
    """Reads an answer that `pack_answer` has packed.

    Raises:
        ValueError, TypeError: a function has written this to its owner, not `pack_answer`.
    """
    return [_unpacked(*values) for values in msgpack.unpackb(packed)]


def unpacker(longest: int = 0) -> Any:
    """Takes bytes as they come (`feed`) and gives messages (by iteration), of `longest` bytes at most (0: of any)."""
    return msgpack.Unpacker(max_buffer_size=longest)


def pack(message: Any) -> bytes:
    """A message as bytes."""
    packed: bytes = msgpack.packb(message)
    return packed


def _packed(outcome: Outcome) -> tuple[Any, ...]:
    if isinstance(outcome, Unscorable):
        return _UNSCORABLE, outcome.reason
    if isinstance(outcome, Failed):
        return _FAILED, outcome.code, outcome.message, outcome.retryable, float(outcome.retry_after_s)
    try:
        components = {_sendable(str(name)): float(value) for name, value in outcome.components.items()}
        per_token = [float(value) for value in outcome.per_token]
        spans = [SpanValue.of(span) for span in outcome.spans]
        grounds = _sendable(outcome.evidence), float(outcome.cost)
        rest = bool(outcome.cached), outcome.answer
        return _SCORED, float(outcome.total), components, per_token, spans, *grounds, *rest
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        return _packed(Failed("bad_output", f"a reward that is not made of numbers: {error}"))


def _sendable(text: str) -> str:
    text.encode()
    return text


def _unpacked(kind: int, *values: Any) -> Outcome:
    if kind == _SCORED:
        total, components, per_token, spans, evidence, cost, cached, answer = values
        return Scored(
            float(total),
            {str(name): float(value) for name, value in components.items()},
            [float(value) for value in per_token],
            [SpanValue.of(span) for span in spans],
            str(evidence),
            float(cost),
            bool(cached),
            None if answer is None else str(answer),
        )
    if kind == _UNSCORABLE:
        return Unscorable(*values)
    if kind == _FAILED:
        code, message, retryable, retry_after_s = values
        return Failed(code, message, bool(retryable), float(retry_after_s))
    raise ValueError(f"no kind of outcome: {kind}")
