from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_SCORED: _ClassVar[Outcome]
    OUTCOME_UNSCORABLE: _ClassVar[Outcome]
    OUTCOME_ERROR: _ClassVar[Outcome]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_SCORED: Outcome
OUTCOME_UNSCORABLE: Outcome
OUTCOME_ERROR: Outcome

class PolicyVersion(_message.Message):
    __slots__ = ("incarnation", "version")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    version: int
    def __init__(self, incarnation: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_tokens", "stop", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ...) -> None: ...

class PromptTask(_message.Message):
    __slots__ = ("task_id", "ordinal", "row", "prompt_ids", "prompt_text", "data_source", "ground_truth_json", "extra_info_json", "n", "sampling", "pinned", "greedy", "messages_json", "images", "image_digests", "seen")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    GROUND_TRUTH_JSON_FIELD_NUMBER: _ClassVar[int]
    EXTRA_INFO_JSON_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    GREEDY_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    ordinal: int
    row: int
    prompt_ids: bytes
    prompt_text: str
    data_source: str
    ground_truth_json: str
    extra_info_json: str
    n: int
    sampling: SamplingParams
    pinned: PolicyVersion
    greedy: int
    messages_json: str
    images: _containers.RepeatedScalarFieldContainer[bytes]
    image_digests: _containers.RepeatedScalarFieldContainer[str]
    seen: SeenPrompt
    def __init__(self, task_id: _Optional[str] = ..., ordinal: _Optional[int] = ..., row: _Optional[int] = ..., prompt_ids: _Optional[bytes] = ..., prompt_text: _Optional[str] = ..., data_source: _Optional[str] = ..., ground_truth_json: _Optional[str] = ..., extra_info_json: _Optional[str] = ..., n: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., pinned: _Optional[_Union[PolicyVersion, _Mapping]] = ..., greedy: _Optional[int] = ..., messages_json: _Optional[str] = ..., images: _Optional[_Iterable[bytes]] = ..., image_digests: _Optional[_Iterable[str]] = ..., seen: _Optional[_Union[SeenPrompt, _Mapping]] = ...) -> None: ...

class SeenPrompt(_message.Message):
    __slots__ = ("tokens", "digest")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    digest: str
    def __init__(self, tokens: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class MemberMeta(_message.Message):
    __slots__ = ("member", "outcome", "reward", "components", "reason", "finish_reason", "prompt_tokens", "response_tokens", "oldest", "newest", "generator", "finished_unix_ns", "side", "metrics", "answer", "unscored_ids")
    class ComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    GENERATOR_FIELD_NUMBER: _ClassVar[int]
    FINISHED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    UNSCORED_IDS_FIELD_NUMBER: _ClassVar[int]
    member: int
    outcome: Outcome
    reward: float
    components: _containers.ScalarMap[str, float]
    reason: str
    finish_reason: FinishReason
    prompt_tokens: int
    response_tokens: int
    oldest: PolicyVersion
    newest: PolicyVersion
    generator: str
    finished_unix_ns: int
    side: _containers.RepeatedCompositeFieldContainer[SideData]
    metrics: _containers.ScalarMap[str, float]
    answer: str
    unscored_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, member: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., reward: _Optional[float] = ..., components: _Optional[_Mapping[str, float]] = ..., reason: _Optional[str] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., prompt_tokens: _Optional[int] = ..., response_tokens: _Optional[int] = ..., oldest: _Optional[_Union[PolicyVersion, _Mapping]] = ..., newest: _Optional[_Union[PolicyVersion, _Mapping]] = ..., generator: _Optional[str] = ..., finished_unix_ns: _Optional[int] = ..., side: _Optional[_Iterable[_Union[SideData, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., answer: _Optional[str] = ..., unscored_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SideData(_message.Message):
    __slots__ = ("name", "bytes", "digest", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    digest: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ..., digest: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...
