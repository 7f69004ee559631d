"""Input of a reward function, and its three kinds of outcome.

Invariants: a `Scored` that leaves this package is finite in total, components and per-token values. Whatever went wrong
is a `Failed` with a stable code, so that no failure is ever mistaken for a reward of zero. A reason is text that can be
sent, of bounded length, whatever a function, a model or a dataset has put into it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.text import EVIDENCE_CHARACTERS, bounded, showable
from rollmesh.protos import reward_pb2

NOT_BEGUN = "not_begun"
"""Code of an item that could not be begun in time: no failure, it is sent again for as long as it takes."""
PENDING = "pending"
"""Code of an item whose reward is known only later: no failure, it is asked again when its time has come."""
NO_FAILURES = frozenset({NOT_BEGUN, PENDING})
"""Codes of items that have no reward yet, and have not failed."""
# Characters of a reason, and of an error's code.
REASON_LENGTH = 2000
_CODE_LENGTH = 64
# Characters of evidence.
EVIDENCE_LENGTH = EVIDENCE_CHARACTERS
# Characters of an answer: of a longer one, so many and its digest tell it from others.
_ANSWER_LENGTH = 120
# Trainers compute in float32, in which larger numbers are infinite.
_LARGEST = 3.4028234663852886e38
# No server makes callers wait longer.
_LONGEST_RETRY_MS = 600_000
# Characters of a JSON field. Decoding holds the interpreter, about 10 ms for each million of them.
JSON_LENGTH = 8 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a response: characters (Unicode code points) from `begin` to before `end`; `kind`: turn, tool, step."""

    begin: int
    end: int
    kind: str = ""


@dataclass(frozen=True, slots=True)
class RewardItem:
    """A response to score, as reward functions see it.

    Attributes:
        item_id: unique in its request.
        group_id: the group (all responses to one prompt) it belongs to.
        data_source: the dataset's data_source.
        prompt, response: text; special tokens are left out of the response.
        ground_truth: the dataset's reward_model.ground_truth; None when the row has none.
        extra_info: the dataset's extra_info; empty when the row has none.
        response_ids: token ids of the response; empty for a service that does not want them.
        run, trajectory_id, attempt, policy_version: origin of the response; see reward.proto.
        finish_reason: stop, length, ...; empty if it is not known.
        messages: prompt and response in the OpenAI form, where they are wanted; else empty.
        images: address or path of each image of the prompt, and the SHA-256 of its bytes (empty if not read).
        token_ends: for each token the characters of `response` up to its end, where they are wanted; else empty.
        spans: parts of the response.
        image_contents: the bytes of each image, where they are wanted; else empty.
        content_key: equal for items of equal content; empty if there is none.
        turn_count: of the model in an episode, at least 1; 0 if it is not known.
        turns: their texts, where they are wanted; else empty.
    """

    item_id: str
    group_id: str
    data_source: str
    prompt: str
    response: str
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    response_ids: Sequence[int] = ()
    run: str = ""
    trajectory_id: str = ""
    attempt: int = 0
    policy_version: int = 0
    finish_reason: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    images: Sequence[tuple[str, bytes]] = ()
    token_ends: Sequence[int] = ()
    spans: Sequence[Span] = ()
    content_key: bytes = b""
    turn_count: int = 0
    turns: Sequence[str] = ()
    image_contents: Sequence[bytes] = ()

    @classmethod
    def from_proto(cls, message: reward_pb2.ScoreItem) -> RewardItem:
        """Decodes the JSON fields.

        Raises:
            PayloadError: where a JSON field is malformed, too long or too deeply nested, extra_info is no object, or
                messages are no list of objects.
        """
        text = message.extra_info_json
        extra_info = {} if text == "{}" else _decode(text, "extra_info_json")
        if extra_info is not None and not isinstance(extra_info, dict):
            raise PayloadError("extra_info_json", f"expected a JSON object, got {type(extra_info).__name__}")
        messages = _decode(message.messages_json, "messages_json") or []
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise PayloadError("messages_json", "expected a JSON list of objects")
        return cls(
            item_id=message.item_id,
            group_id=message.group_id,
            data_source=message.data_source,
            prompt=message.prompt,
            response=message.response,
            ground_truth=_decode(message.ground_truth_json, "ground_truth_json"),
            extra_info=extra_info or {},
            response_ids=message.response_ids,
            run=message.run,
            trajectory_id=message.trajectory_id,
            attempt=message.attempt,
            policy_version=message.policy_version,
            finish_reason=message.finish_reason,
            messages=messages,
            images=[(image.uri, image.sha256) for image in message.images],
            token_ends=message.token_ends,
            spans=[Span(span.begin, span.end, span.kind) for span in message.spans],
            content_key=message.content_key,
            turn_count=message.turn_count,
            turns=message.turns,
            image_contents=[image.content for image in message.images if image.content],
        )


def _decode(text: str, field_name: str) -> Any:
    if not text:
        return None
    if len(text) > JSON_LENGTH:
        raise PayloadError(field_name, f"{len(text)} characters of JSON, {JSON_LENGTH} are allowed")
    try:
        return json.loads(text)
    except ValueError as error:
        raise PayloadError(field_name, f"not JSON: {error}") from error
    except RecursionError as error:
        raise PayloadError(field_name, "JSON that is nested too deeply") from error


class SpanValue(NamedTuple):
    """The reward of a part.

    Attributes:
        begin, end: characters (Unicode code points) of the response, or of the turn; both 0: all of the turn.
        value: finite.
        turn: of an episode, from 1; 0: the part is one of the response.
        of_total: the value is a part of the total, which stands here instead of at the last token.
    """

    begin: int
    end: int
    value: float
    turn: int = 0
    of_total: bool = False

    @classmethod
    def of(cls, span: SpanValue | tuple[int, int, float]) -> SpanValue:
        """The same with numbers of the plain types.

        Raises:
            TypeError, ValueError: for anything else.
        """
        begin, end, value, turn, of_total = cls(*span)
        return cls(int(begin), int(end), float(value), int(turn), bool(of_total))

    def fault(self, characters: int | None, turns: int) -> str:
        """The reason why there is no such part; empty where there is.

        Args:
            characters: of the response, or of the turn; None: not known.
            turns: of the episode; 0: not known.
        """
        if self.turn < 0 or 0 < turns < self.turn:
            return f"turn {self.turn} of {turns}"
        if self.turn and not self.begin and not self.end:
            return ""
        if not 0 <= self.begin < self.end or (characters is not None and self.end > characters):
            where = f"turn {self.turn}" if self.turn else "a response"
            return f"{self.begin}:{self.end} of {where}" + (
                "" if characters is None else f" of {characters} characters"
            )
        return ""


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward.

    Attributes:
        total: finite.
        components: named parts of it.
        per_token: one value per response token, or empty.
        spans: `SpanValue` or (begin, end, value) of rewarded parts, in characters of the response; or empty.
        evidence: grounds for a reader, at most `EVIDENCE_LENGTH` characters.
        cost: of the score, in the currency of the service's owner.
        cached: it was found earlier, for equal content.
        answer: the response's answer as the scorer reads it, the same text for all that it takes for equal; a long one
            is shortened. Empty: the scorer finds none. None: it reads no answers. Equal rewards may have others.
    """

    total: float
    components: Mapping[str, float] = field(default_factory=dict)
    per_token: Sequence[float] = ()
    spans: Sequence[SpanValue | tuple[int, int, float]] = ()
    evidence: str = ""
    cost: float = 0.0
    cached: bool = False
    answer: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.evidence:
            object.__setattr__(self, "evidence", bounded(str(self.evidence), EVIDENCE_LENGTH))
        if self.answer:
            object.__setattr__(self, "answer", _shortened(self.answer))


def _shortened(answer: str) -> str:
    """An answer that can be sent, of bounded length."""
    if len(answer) > _ANSWER_LENGTH:
        digest = hashlib.sha256(answer.encode("utf-8", "replace")).hexdigest()[:16]
        answer = f"{answer[: _ANSWER_LENGTH - len(digest)]}{digest}"
    return showable(answer)


@dataclass(frozen=True, slots=True)
class Unscorable:
    """The outcome of an item without a right score; it is left out of its group's baseline."""

    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", bounded(str(self.reason), REASON_LENGTH))


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure of scoring.

    Attributes:
        code: short and stable: timeout, crashed, exception, nan, bad_input, not_begun, ...
        message: for a reader.
        retryable: the same item may succeed when tried again.
        retry_after_s: seconds to wait before that; 0: the caller decides.
    """

    code: str
    message: str
    retryable: bool = False
    retry_after_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", bounded(str(self.code), _CODE_LENGTH))
        object.__setattr__(self, "message", bounded(str(self.message), REASON_LENGTH))


def not_begun(why: str) -> Failed:
    """The outcome of an item that could not be begun in time."""
    return Failed(NOT_BEGUN, f"not begun yet: {why}", retryable=True)


def is_not_begun(result: reward_pb2.ScoreResult) -> bool:
    """True if the item of a result has only not been begun in time: its code is `NOT_BEGUN`."""
    return result.WhichOneof("outcome") == "error" and result.error.code == NOT_BEGUN


def later(ticket: str, retry_after_s: float = 0.0) -> Failed:
    """The promise of a reward that is delivered later (`rollmesh reward deliver`); reward functions return it.

    Args:
        ticket: a name for the reward, at most `REASON_LENGTH` characters; items may share one.
        retry_after_s: seconds until the item is asked again; 0: as the service is configured.
    """
    return Failed(PENDING, ticket, retryable=True, retry_after_s=retry_after_s)


def is_pending(result: reward_pb2.ScoreResult) -> bool:
    """True if the reward of a result's item is known only later."""
    return result.WhichOneof("outcome") == "error" and result.error.code == PENDING


Outcome = Scored | Unscorable | Failed
OnAnswer = Callable[[int, "list[Outcome] | Failed"], None]
"""Receives the place of one call of a function among several, and its outcomes, or the failure of all of them."""


def is_finite(value: float) -> bool:
    """True for a number that is finite where rewards are used."""
    return abs(value) <= _LARGEST


def checked_outcome(outcome: Outcome, item: RewardItem, function: str) -> Outcome:
    """Turns a `Scored` that breaks the contract (not finite, wrong per-token length) into a `Failed`.

    Args:
        function: names the reward function for the reader of the error.
    """
    if not isinstance(outcome, Scored):
        return outcome
    if not is_finite(outcome.total):
        return Failed("nan", f"{function} returned {outcome.total}")
    for name, value in outcome.components.items():
        if not is_finite(value):
            return Failed("nan", f"{function} returned {value} for component {name!r}")
    if outcome.per_token:
        # Where neither came with the item, its caller knows their number and checks it.
        tokens = len(item.response_ids) or len(item.token_ends)
        if tokens and len(outcome.per_token) != tokens:
            return Failed(
                "per_token_length",
                f"{function} returned {len(outcome.per_token)} per-token values for {tokens} tokens",
            )
        if not all(map(is_finite, outcome.per_token)):
            return Failed("nan", f"{function} returned a per-token value that is not finite")
    if outcome.spans:
        return _checked_spans(outcome, item, function)
    return outcome


def _checked_spans(outcome: Scored, item: RewardItem, function: str) -> Outcome:
    for span in map(SpanValue.of, outcome.spans):
        if fault := span.fault(characters_of(span.turn, item.response, item.turns), item.turn_count):
            return Failed("bad_span", f"{function} returned span {fault}")
        if not is_finite(span.value):
            return Failed("nan", f"{function} returned {span.value} for span {span.begin}:{span.end}")
    return outcome


def characters_of(turn: int, response: str, turns: Sequence[str]) -> int | None:
    """Characters of a turn's text, or of the response for turn 0; None where the texts of turns are not known."""
    if not turn:
        return len(response)
    return len(turns[turn - 1]) if 0 < turn <= len(turns) else None


def to_proto(item_id: str, outcome: Outcome) -> reward_pb2.ScoreResult:
    """The wire form of an outcome; one with a name that cannot be encoded is a failure."""
    try:
        return _to_proto(item_id, outcome)
    except UnicodeEncodeError as error:
        return _to_proto(item_id, Failed("bad_output", f"a name that is no text: {error}"))


def _to_proto(item_id: str, outcome: Outcome) -> reward_pb2.ScoreResult:
    if isinstance(outcome, Scored):
        scored = reward_pb2.Scored(
            total=outcome.total,
            components=outcome.components,
            per_token=outcome.per_token,
            spans=[reward_pb2.SpanReward(**SpanValue.of(span)._asdict()) for span in outcome.spans],
            evidence=outcome.evidence,
            cost=outcome.cost,
            cached=outcome.cached,
            answer=outcome.answer,
        )
        return reward_pb2.ScoreResult(item_id=item_id, scored=scored)
    if isinstance(outcome, Unscorable):
        return reward_pb2.ScoreResult(item_id=item_id, unscorable=reward_pb2.Unscorable(reason=outcome.reason))
    result = error_result(item_id, outcome.code, outcome.message, retryable=outcome.retryable)
    result.error.retry_after_ms = min(round(outcome.retry_after_s * 1000), _LONGEST_RETRY_MS)
    return result


def error_result(item_id: str, code: str, message: str, *, retryable: bool) -> reward_pb2.ScoreResult:
    """A result that says that scoring failed."""
    error = reward_pb2.Error(code=code, message=message, retryable=retryable)
    return reward_pb2.ScoreResult(item_id=item_id, error=error)
