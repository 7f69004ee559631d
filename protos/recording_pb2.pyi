from rollmesh.protos import buffer_pb2 as _buffer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RecordedBatch(_message.Message):
    __slots__ = ("incarnation", "version", "groups", "dropped", "takeovers", "payloads", "planned_end")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    TAKEOVERS_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    PLANNED_END_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    version: int
    groups: _containers.RepeatedCompositeFieldContainer[_buffer_pb2.LeasedGroup]
    dropped: _containers.ScalarMap[str, int]
    takeovers: _containers.RepeatedCompositeFieldContainer[_buffer_pb2.Takeover]
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    planned_end: int
    def __init__(self, incarnation: _Optional[int] = ..., version: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[_buffer_pb2.LeasedGroup, _Mapping]]] = ..., dropped: _Optional[_Mapping[str, int]] = ..., takeovers: _Optional[_Iterable[_Union[_buffer_pb2.Takeover, _Mapping]]] = ..., payloads: _Optional[_Iterable[bytes]] = ..., planned_end: _Optional[int] = ...) -> None: ...
