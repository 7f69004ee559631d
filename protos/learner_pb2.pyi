from rollmesh.protos import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LearnerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LearnerStatusResponse(_message.Message):
    __slots__ = ("published", "total_steps", "metrics", "phase", "committed_version", "reason", "placement")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    published: _trajectory_pb2.PolicyVersion
    total_steps: int
    metrics: _containers.ScalarMap[str, float]
    phase: str
    committed_version: int
    reason: str
    placement: PlacementStatus
    def __init__(self, published: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., total_steps: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., phase: _Optional[str] = ..., committed_version: _Optional[int] = ..., reason: _Optional[str] = ..., placement: _Optional[_Union[PlacementStatus, _Mapping]] = ...) -> None: ...

class PlacementStatus(_message.Message):
    __slots__ = ("mode", "phase", "phase_ms", "reason", "turns", "taken_back", "held_ms")
    MODE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_BACK_FIELD_NUMBER: _ClassVar[int]
    HELD_MS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    phase: str
    phase_ms: int
    reason: str
    turns: int
    taken_back: int
    held_ms: int
    def __init__(self, mode: _Optional[str] = ..., phase: _Optional[str] = ..., phase_ms: _Optional[int] = ..., reason: _Optional[str] = ..., turns: _Optional[int] = ..., taken_back: _Optional[int] = ..., held_ms: _Optional[int] = ...) -> None: ...

class YieldRequest(_message.Message):
    __slots__ = ("hold_ms",)
    HOLD_MS_FIELD_NUMBER: _ClassVar[int]
    hold_ms: int
    def __init__(self, hold_ms: _Optional[int] = ...) -> None: ...

class YieldResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeTurnsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeTurnsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("path", "version")
    PATH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    path: str
    version: int
    def __init__(self, path: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
