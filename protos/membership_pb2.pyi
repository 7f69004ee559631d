from rollmesh.protos import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_LEARNER: _ClassVar[Role]
    ROLE_GENERATOR: _ClassVar[Role]
    ROLE_REWARD: _ClassVar[Role]
    ROLE_BUFFER: _ClassVar[Role]
    ROLE_MODEL: _ClassVar[Role]

class WaitCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_CAUSE_UNSPECIFIED: _ClassVar[WaitCause]
    WAIT_CAUSE_NO_REWARD_SERVICE: _ClassVar[WaitCause]
    WAIT_CAUSE_REWARD_OVERDUE: _ClassVar[WaitCause]
ROLE_UNSPECIFIED: Role
ROLE_LEARNER: Role
ROLE_GENERATOR: Role
ROLE_REWARD: Role
ROLE_BUFFER: Role
ROLE_MODEL: Role
WAIT_CAUSE_UNSPECIFIED: WaitCause
WAIT_CAUSE_NO_REWARD_SERVICE: WaitCause
WAIT_CAUSE_REWARD_OVERDUE: WaitCause

class Member(_message.Message):
    __slots__ = ("member_id", "role", "address", "host_id", "pid", "serving", "gauges", "heartbeat_age_ms", "waiting_reason", "joined_unix_ms", "endpoint", "wait_cause")
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REASON_FIELD_NUMBER: _ClassVar[int]
    JOINED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    WAIT_CAUSE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    role: Role
    address: str
    host_id: str
    pid: int
    serving: _trajectory_pb2.PolicyVersion
    gauges: _containers.ScalarMap[str, float]
    heartbeat_age_ms: int
    waiting_reason: str
    joined_unix_ms: int
    endpoint: str
    wait_cause: WaitCause
    def __init__(self, member_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., host_id: _Optional[str] = ..., pid: _Optional[int] = ..., serving: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., gauges: _Optional[_Mapping[str, float]] = ..., heartbeat_age_ms: _Optional[int] = ..., waiting_reason: _Optional[str] = ..., joined_unix_ms: _Optional[int] = ..., endpoint: _Optional[str] = ..., wait_cause: _Optional[_Union[WaitCause, str]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("member_id", "role", "address", "host_id", "pid", "protocol", "call", "challenge")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    role: Role
    address: str
    host_id: str
    pid: int
    protocol: int
    call: int
    challenge: bytes
    def __init__(self, member_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., host_id: _Optional[str] = ..., pid: _Optional[int] = ..., protocol: _Optional[int] = ..., call: _Optional[int] = ..., challenge: _Optional[bytes] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("generation", "run_config_json", "heartbeat_interval_ms", "member_ttl_ms", "run_name", "fronts", "proof", "call")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RUN_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    FRONTS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    generation: int
    run_config_json: str
    heartbeat_interval_ms: int
    member_ttl_ms: int
    run_name: str
    fronts: _containers.RepeatedScalarFieldContainer[str]
    proof: str
    call: int
    def __init__(self, generation: _Optional[int] = ..., run_config_json: _Optional[str] = ..., heartbeat_interval_ms: _Optional[int] = ..., member_ttl_ms: _Optional[int] = ..., run_name: _Optional[str] = ..., fronts: _Optional[_Iterable[str]] = ..., proof: _Optional[str] = ..., call: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("member_id", "generation", "serving", "gauges", "waiting_reason", "incarnation", "endpoint", "challenge", "wait_cause")
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    WAITING_REASON_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    WAIT_CAUSE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    generation: int
    serving: _trajectory_pb2.PolicyVersion
    gauges: _containers.ScalarMap[str, float]
    waiting_reason: str
    incarnation: int
    endpoint: str
    challenge: bytes
    wait_cause: WaitCause
    def __init__(self, member_id: _Optional[str] = ..., generation: _Optional[int] = ..., serving: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., gauges: _Optional[_Mapping[str, float]] = ..., waiting_reason: _Optional[str] = ..., incarnation: _Optional[int] = ..., endpoint: _Optional[str] = ..., challenge: _Optional[bytes] = ..., wait_cause: _Optional[_Union[WaitCause, str]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("known", "fenced", "learner", "policy", "run_finished", "fronts", "proof")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    RUN_FINISHED_FIELD_NUMBER: _ClassVar[int]
    FRONTS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    known: bool
    fenced: bool
    learner: Member
    policy: _trajectory_pb2.PolicyVersion
    run_finished: bool
    fronts: _containers.RepeatedScalarFieldContainer[str]
    proof: str
    def __init__(self, known: _Optional[bool] = ..., fenced: _Optional[bool] = ..., learner: _Optional[_Union[Member, _Mapping]] = ..., policy: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., run_finished: _Optional[bool] = ..., fronts: _Optional[_Iterable[str]] = ..., proof: _Optional[str] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("member_id", "generation", "run_finished")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RUN_FINISHED_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    generation: int
    run_finished: bool
    def __init__(self, member_id: _Optional[str] = ..., generation: _Optional[int] = ..., run_finished: _Optional[bool] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: Role
    def __init__(self, role: _Optional[_Union[Role, str]] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("members", "run_finished")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RUN_FINISHED_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    run_finished: bool
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., run_finished: _Optional[bool] = ...) -> None: ...
