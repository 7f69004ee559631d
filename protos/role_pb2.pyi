from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRoleRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRoleResponse(_message.Message):
    __slots__ = ("role", "kind", "trained", "vocab_size", "engine", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    role: str
    kind: str
    trained: bool
    vocab_size: int
    engine: str
    settings: _containers.ScalarMap[str, str]
    def __init__(self, role: _Optional[str] = ..., kind: _Optional[str] = ..., trained: _Optional[bool] = ..., vocab_size: _Optional[int] = ..., engine: _Optional[str] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RoleCall(_message.Message):
    __slots__ = ("session", "incarnation", "number")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    session: str
    incarnation: int
    number: int
    def __init__(self, session: _Optional[str] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class AttachRoleRequest(_message.Message):
    __slots__ = ("session", "incarnation", "checkpoint")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    session: str
    incarnation: int
    checkpoint: str
    def __init__(self, session: _Optional[str] = ..., incarnation: _Optional[int] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class TensorPart(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    data: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutRoleHeader(_message.Message):
    __slots__ = ("call", "kept")
    CALL_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    call: RoleCall
    kept: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, call: _Optional[_Union[RoleCall, _Mapping]] = ..., kept: _Optional[_Iterable[str]] = ...) -> None: ...

class RolePart(_message.Message):
    __slots__ = ("header", "tensor")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    header: PutRoleHeader
    tensor: TensorPart
    def __init__(self, header: _Optional[_Union[PutRoleHeader, _Mapping]] = ..., tensor: _Optional[_Union[TensorPart, _Mapping]] = ...) -> None: ...

class PutRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InferRoleRequest(_message.Message):
    __slots__ = ("call", "minibatches", "sum_pi_squared")
    CALL_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_FIELD_NUMBER: _ClassVar[int]
    SUM_PI_SQUARED_FIELD_NUMBER: _ClassVar[int]
    call: RoleCall
    minibatches: _containers.RepeatedScalarFieldContainer[int]
    sum_pi_squared: bool
    def __init__(self, call: _Optional[_Union[RoleCall, _Mapping]] = ..., minibatches: _Optional[_Iterable[int]] = ..., sum_pi_squared: _Optional[bool] = ...) -> None: ...

class AccumulateRoleRequest(_message.Message):
    __slots__ = ("call", "loss", "minibatch", "skip_zero_advantage", "algorithm_state")
    CALL_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    MINIBATCH_FIELD_NUMBER: _ClassVar[int]
    SKIP_ZERO_ADVANTAGE_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_STATE_FIELD_NUMBER: _ClassVar[int]
    call: RoleCall
    loss: str
    minibatch: int
    skip_zero_advantage: bool
    algorithm_state: str
    def __init__(self, call: _Optional[_Union[RoleCall, _Mapping]] = ..., loss: _Optional[str] = ..., minibatch: _Optional[int] = ..., skip_zero_advantage: _Optional[bool] = ..., algorithm_state: _Optional[str] = ...) -> None: ...

class ApplyRoleRequest(_message.Message):
    __slots__ = ("call", "step", "steps")
    CALL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    call: RoleCall
    step: int
    steps: int
    def __init__(self, call: _Optional[_Union[RoleCall, _Mapping]] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class DiscardRoleRequest(_message.Message):
    __slots__ = ("call",)
    CALL_FIELD_NUMBER: _ClassVar[int]
    call: RoleCall
    def __init__(self, call: _Optional[_Union[RoleCall, _Mapping]] = ...) -> None: ...

class BeginRoleCheckpointRequest(_message.Message):
    __slots__ = ("call", "folder", "extra")
    CALL_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    call: RoleCall
    folder: str
    extra: str
    def __init__(self, call: _Optional[_Union[RoleCall, _Mapping]] = ..., folder: _Optional[str] = ..., extra: _Optional[str] = ...) -> None: ...

class AwaitRoleCheckpointRequest(_message.Message):
    __slots__ = ("call",)
    CALL_FIELD_NUMBER: _ClassVar[int]
    call: RoleCall
    def __init__(self, call: _Optional[_Union[RoleCall, _Mapping]] = ...) -> None: ...

class RoleWorking(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RoleStep(_message.Message):
    __slots__ = ("metrics", "skipped")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    skipped: bool
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ..., skipped: _Optional[bool] = ...) -> None: ...

class RoleAnswer(_message.Message):
    __slots__ = ("working", "tensor", "step")
    WORKING_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    working: RoleWorking
    tensor: TensorPart
    step: RoleStep
    def __init__(self, working: _Optional[_Union[RoleWorking, _Mapping]] = ..., tensor: _Optional[_Union[TensorPart, _Mapping]] = ..., step: _Optional[_Union[RoleStep, _Mapping]] = ...) -> None: ...
