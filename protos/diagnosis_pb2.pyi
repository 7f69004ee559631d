from rollmesh.protos import membership_pb2 as _membership_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExamineRequest(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: bool
    def __init__(self, peers: _Optional[bool] = ...) -> None: ...

class ExamineResponse(_message.Message):
    __slots__ = ("unix_ms", "redis_unix_ms", "peers", "run_config_json")
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    REDIS_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    RUN_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    unix_ms: int
    redis_unix_ms: int
    peers: _containers.RepeatedCompositeFieldContainer[PeerReach]
    run_config_json: str
    def __init__(self, unix_ms: _Optional[int] = ..., redis_unix_ms: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[PeerReach, _Mapping]]] = ..., run_config_json: _Optional[str] = ...) -> None: ...

class PeerReach(_message.Message):
    __slots__ = ("role", "address", "milliseconds", "error")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    role: _membership_pb2.Role
    address: str
    milliseconds: float
    error: str
    def __init__(self, role: _Optional[_Union[_membership_pb2.Role, str]] = ..., address: _Optional[str] = ..., milliseconds: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...
