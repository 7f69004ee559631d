from rollmesh.protos import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SleepLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLEEP_LEVEL_UNSPECIFIED: _ClassVar[SleepLevel]
    SLEEP_LEVEL_FROZEN: _ClassVar[SleepLevel]
    SLEEP_LEVEL_WITHOUT_KV_CACHE: _ClassVar[SleepLevel]
    SLEEP_LEVEL_WITHOUT_WEIGHTS: _ClassVar[SleepLevel]

class WakeStep(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAKE_STEP_UNSPECIFIED: _ClassVar[WakeStep]
    WAKE_STEP_MEMORY: _ClassVar[WakeStep]
    WAKE_STEP_WEIGHTS: _ClassVar[WakeStep]
    WAKE_STEP_VERIFIED: _ClassVar[WakeStep]
    WAKE_STEP_GENERATING: _ClassVar[WakeStep]
SLEEP_LEVEL_UNSPECIFIED: SleepLevel
SLEEP_LEVEL_FROZEN: SleepLevel
SLEEP_LEVEL_WITHOUT_KV_CACHE: SleepLevel
SLEEP_LEVEL_WITHOUT_WEIGHTS: SleepLevel
WAKE_STEP_UNSPECIFIED: WakeStep
WAKE_STEP_MEMORY: WakeStep
WAKE_STEP_WEIGHTS: WakeStep
WAKE_STEP_VERIFIED: WakeStep
WAKE_STEP_GENERATING: WakeStep

class GeneratorStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GeneratorStatusResponse(_message.Message):
    __slots__ = ("serving", "weights_digest", "groups_held", "active_sequences", "queued_sequences", "tokens_generated", "swaps", "waiting_reason", "engine", "weights_transport", "context", "shares_devices", "sleeping")
    SERVING_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GROUPS_HELD_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    SWAPS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REASON_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SHARES_DEVICES_FIELD_NUMBER: _ClassVar[int]
    SLEEPING_FIELD_NUMBER: _ClassVar[int]
    serving: _trajectory_pb2.PolicyVersion
    weights_digest: str
    groups_held: int
    active_sequences: int
    queued_sequences: int
    tokens_generated: int
    swaps: int
    waiting_reason: str
    engine: str
    weights_transport: str
    context: int
    shares_devices: bool
    sleeping: SleepLevel
    def __init__(self, serving: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., weights_digest: _Optional[str] = ..., groups_held: _Optional[int] = ..., active_sequences: _Optional[int] = ..., queued_sequences: _Optional[int] = ..., tokens_generated: _Optional[int] = ..., swaps: _Optional[int] = ..., waiting_reason: _Optional[str] = ..., engine: _Optional[str] = ..., weights_transport: _Optional[str] = ..., context: _Optional[int] = ..., shares_devices: _Optional[bool] = ..., sleeping: _Optional[_Union[SleepLevel, str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompt_ids", "prompt", "sampling")
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt: str
    sampling: _trajectory_pb2.SamplingParams
    def __init__(self, prompt_ids: _Optional[_Iterable[int]] = ..., prompt: _Optional[str] = ..., sampling: _Optional[_Union[_trajectory_pb2.SamplingParams, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("response_ids", "log_probs", "versions", "finish_reason", "text")
    RESPONSE_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    response_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    versions: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.PolicyVersion]
    finish_reason: _trajectory_pb2.FinishReason
    text: str
    def __init__(self, response_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ..., versions: _Optional[_Iterable[_Union[_trajectory_pb2.PolicyVersion, _Mapping]]] = ..., finish_reason: _Optional[_Union[_trajectory_pb2.FinishReason, str]] = ..., text: _Optional[str] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("serving", "announced_digest", "found_digest", "not_comparable", "differing", "log_probs")
    SERVING_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FOUND_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NOT_COMPARABLE_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    serving: _trajectory_pb2.PolicyVersion
    announced_digest: str
    found_digest: str
    not_comparable: str
    differing: _containers.RepeatedScalarFieldContainer[str]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, serving: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., announced_digest: _Optional[str] = ..., found_digest: _Optional[str] = ..., not_comparable: _Optional[str] = ..., differing: _Optional[_Iterable[str]] = ..., log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("incarnation", "level")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    level: SleepLevel
    def __init__(self, incarnation: _Optional[int] = ..., level: _Optional[_Union[SleepLevel, str]] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("incarnation", "step", "policy", "probe_ids", "probe_log_probs", "others_generate")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PROBE_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBE_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_GENERATE_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    step: WakeStep
    policy: _trajectory_pb2.PolicyVersion
    probe_ids: _containers.RepeatedScalarFieldContainer[int]
    probe_log_probs: _containers.RepeatedScalarFieldContainer[float]
    others_generate: bool
    def __init__(self, incarnation: _Optional[int] = ..., step: _Optional[_Union[WakeStep, str]] = ..., policy: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., probe_ids: _Optional[_Iterable[int]] = ..., probe_log_probs: _Optional[_Iterable[float]] = ..., others_generate: _Optional[bool] = ...) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ("verified_by",)
    VERIFIED_BY_FIELD_NUMBER: _ClassVar[int]
    verified_by: str
    def __init__(self, verified_by: _Optional[str] = ...) -> None: ...
