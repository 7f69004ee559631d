from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreStreamRequest(_message.Message):
    __slots__ = ("item", "cancel", "timeout_ms")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    item: ScoreItem
    cancel: str
    timeout_ms: int
    def __init__(self, item: _Optional[_Union[ScoreItem, _Mapping]] = ..., cancel: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ScoreItem]
    def __init__(self, items: _Optional[_Iterable[_Union[ScoreItem, _Mapping]]] = ...) -> None: ...

class ScoreItem(_message.Message):
    __slots__ = ("item_id", "group_id", "data_source", "prompt", "response", "ground_truth_json", "extra_info_json", "response_ids", "run", "trajectory_id", "attempt", "policy_version", "finish_reason", "messages_json", "images", "token_ends", "spans", "content_key", "turn_count", "turns")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    GROUND_TRUTH_JSON_FIELD_NUMBER: _ClassVar[int]
    EXTRA_INFO_JSON_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_IDS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORY_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ENDS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_KEY_FIELD_NUMBER: _ClassVar[int]
    TURN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    item_id: str
    group_id: str
    data_source: str
    prompt: str
    response: str
    ground_truth_json: str
    extra_info_json: str
    response_ids: _containers.RepeatedScalarFieldContainer[int]
    run: str
    trajectory_id: str
    attempt: int
    policy_version: int
    finish_reason: str
    messages_json: str
    images: _containers.RepeatedCompositeFieldContainer[ImageReference]
    token_ends: _containers.RepeatedScalarFieldContainer[int]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    content_key: bytes
    turn_count: int
    turns: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, item_id: _Optional[str] = ..., group_id: _Optional[str] = ..., data_source: _Optional[str] = ..., prompt: _Optional[str] = ..., response: _Optional[str] = ..., ground_truth_json: _Optional[str] = ..., extra_info_json: _Optional[str] = ..., response_ids: _Optional[_Iterable[int]] = ..., run: _Optional[str] = ..., trajectory_id: _Optional[str] = ..., attempt: _Optional[int] = ..., policy_version: _Optional[int] = ..., finish_reason: _Optional[str] = ..., messages_json: _Optional[str] = ..., images: _Optional[_Iterable[_Union[ImageReference, _Mapping]]] = ..., token_ends: _Optional[_Iterable[int]] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., content_key: _Optional[bytes] = ..., turn_count: _Optional[int] = ..., turns: _Optional[_Iterable[str]] = ...) -> None: ...

class ImageReference(_message.Message):
    __slots__ = ("uri", "sha256", "content")
    URI_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    uri: str
    sha256: bytes
    content: bytes
    def __init__(self, uri: _Optional[str] = ..., sha256: _Optional[bytes] = ..., content: _Optional[bytes] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("begin", "end", "kind")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    kind: str
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ..., kind: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ScoreResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ScoreResult, _Mapping]]] = ...) -> None: ...

class ScoreResult(_message.Message):
    __slots__ = ("item_id", "scored", "unscorable", "error")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    UNSCORABLE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    item_id: str
    scored: Scored
    unscorable: Unscorable
    error: Error
    def __init__(self, item_id: _Optional[str] = ..., scored: _Optional[_Union[Scored, _Mapping]] = ..., unscorable: _Optional[_Union[Unscorable, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Scored(_message.Message):
    __slots__ = ("total", "components", "per_token", "spans", "evidence", "cost", "cached", "answer")
    class ComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    total: float
    components: _containers.ScalarMap[str, float]
    per_token: _containers.RepeatedScalarFieldContainer[float]
    spans: _containers.RepeatedCompositeFieldContainer[SpanReward]
    evidence: str
    cost: float
    cached: bool
    answer: str
    def __init__(self, total: _Optional[float] = ..., components: _Optional[_Mapping[str, float]] = ..., per_token: _Optional[_Iterable[float]] = ..., spans: _Optional[_Iterable[_Union[SpanReward, _Mapping]]] = ..., evidence: _Optional[str] = ..., cost: _Optional[float] = ..., cached: _Optional[bool] = ..., answer: _Optional[str] = ...) -> None: ...

class SpanReward(_message.Message):
    __slots__ = ("begin", "end", "value", "turn", "of_total")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    OF_TOTAL_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    value: float
    turn: int
    of_total: bool
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ..., value: _Optional[float] = ..., turn: _Optional[int] = ..., of_total: _Optional[bool] = ...) -> None: ...

class Unscorable(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "retryable", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retryable: bool
    retry_after_ms: int
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("name", "version", "max_items", "scorers", "max_bytes", "max_concurrency", "needs_group", "deterministic", "wants_ids", "wants_messages", "wants_offsets", "streams", "wants_turns", "wants_images")
    class ScorersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_FIELD_NUMBER: _ClassVar[int]
    SCORERS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    NEEDS_GROUP_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    WANTS_IDS_FIELD_NUMBER: _ClassVar[int]
    WANTS_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    WANTS_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    WANTS_TURNS_FIELD_NUMBER: _ClassVar[int]
    WANTS_IMAGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    max_items: int
    scorers: _containers.ScalarMap[str, str]
    max_bytes: int
    max_concurrency: int
    needs_group: bool
    deterministic: bool
    wants_ids: bool
    wants_messages: bool
    wants_offsets: bool
    streams: bool
    wants_turns: bool
    wants_images: bool
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., max_items: _Optional[int] = ..., scorers: _Optional[_Mapping[str, str]] = ..., max_bytes: _Optional[int] = ..., max_concurrency: _Optional[int] = ..., needs_group: _Optional[bool] = ..., deterministic: _Optional[bool] = ..., wants_ids: _Optional[bool] = ..., wants_messages: _Optional[bool] = ..., wants_offsets: _Optional[bool] = ..., streams: _Optional[bool] = ..., wants_turns: _Optional[bool] = ..., wants_images: _Optional[bool] = ...) -> None: ...
