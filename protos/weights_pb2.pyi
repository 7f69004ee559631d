from rollmesh.protos import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetModelBundleRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelFile(_message.Message):
    __slots__ = ("name", "content")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    content: bytes
    def __init__(self, name: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("member_id", "host_id")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    host_id: str
    def __init__(self, member_id: _Optional[str] = ..., host_id: _Optional[str] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("run", "policy", "tensors", "buckets", "digest", "offers", "deltas", "announced_unix_ns", "base", "scale")
    RUN_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_UNIX_NS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    run: str
    policy: _trajectory_pb2.PolicyVersion
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    buckets: _containers.RepeatedCompositeFieldContainer[BucketEntry]
    digest: str
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    announced_unix_ns: int
    base: Manifest
    scale: float
    def __init__(self, run: _Optional[str] = ..., policy: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ..., buckets: _Optional[_Iterable[_Union[BucketEntry, _Mapping]]] = ..., digest: _Optional[str] = ..., offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ..., deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., announced_unix_ns: _Optional[int] = ..., base: _Optional[_Union[Manifest, _Mapping]] = ..., scale: _Optional[float] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("transport", "address", "host_id")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    transport: str
    address: str
    host_id: str
    def __init__(self, transport: _Optional[str] = ..., address: _Optional[str] = ..., host_id: _Optional[str] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("base", "policy", "base_digest", "digest", "buckets")
    BASE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    base: _trajectory_pb2.PolicyVersion
    policy: _trajectory_pb2.PolicyVersion
    base_digest: str
    digest: str
    buckets: _containers.RepeatedCompositeFieldContainer[BucketEntry]
    def __init__(self, base: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., policy: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., base_digest: _Optional[str] = ..., digest: _Optional[str] = ..., buckets: _Optional[_Iterable[_Union[BucketEntry, _Mapping]]] = ...) -> None: ...

class TensorEntry(_message.Message):
    __slots__ = ("name", "dtype", "shape", "digest", "bucket", "offset", "nbytes", "tied_to")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    TIED_TO_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    digest: str
    bucket: int
    offset: int
    nbytes: int
    tied_to: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., digest: _Optional[str] = ..., bucket: _Optional[int] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ..., tied_to: _Optional[str] = ...) -> None: ...

class BucketEntry(_message.Message):
    __slots__ = ("nbytes", "digest")
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    digest: str
    def __init__(self, nbytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class FetchBucketRequest(_message.Message):
    __slots__ = ("policy", "bucket", "offset", "base")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    policy: _trajectory_pb2.PolicyVersion
    bucket: int
    offset: int
    base: _trajectory_pb2.PolicyVersion
    def __init__(self, policy: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., bucket: _Optional[int] = ..., offset: _Optional[int] = ..., base: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class BucketChunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class RouteRequest(_message.Message):
    __slots__ = ("member_id", "policy", "address", "failed", "base")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    policy: _trajectory_pb2.PolicyVersion
    address: str
    failed: _containers.RepeatedScalarFieldContainer[str]
    base: _trajectory_pb2.PolicyVersion
    def __init__(self, member_id: _Optional[str] = ..., policy: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., address: _Optional[str] = ..., failed: _Optional[_Iterable[str]] = ..., base: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class JoinBroadcastRequest(_message.Message):
    __slots__ = ("member_id", "policy", "transport", "group")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    policy: _trajectory_pb2.PolicyVersion
    transport: str
    group: str
    def __init__(self, member_id: _Optional[str] = ..., policy: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., transport: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...

class JoinBroadcastResponse(_message.Message):
    __slots__ = ("address", "rank", "world_size", "group")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    address: str
    rank: int
    world_size: int
    group: str
    def __init__(self, address: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., group: _Optional[str] = ...) -> None: ...

class SwapReport(_message.Message):
    __slots__ = ("member_id", "policy", "error", "digest", "transport", "bytes", "first_byte_us", "last_byte_us", "pause_us", "total_us", "encoding", "source", "kept_bytes", "choice")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_US_FIELD_NUMBER: _ClassVar[int]
    LAST_BYTE_US_FIELD_NUMBER: _ClassVar[int]
    PAUSE_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    policy: _trajectory_pb2.PolicyVersion
    error: str
    digest: str
    transport: str
    bytes: int
    first_byte_us: int
    last_byte_us: int
    pause_us: int
    total_us: int
    encoding: str
    source: str
    kept_bytes: int
    choice: str
    def __init__(self, member_id: _Optional[str] = ..., policy: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., error: _Optional[str] = ..., digest: _Optional[str] = ..., transport: _Optional[str] = ..., bytes: _Optional[int] = ..., first_byte_us: _Optional[int] = ..., last_byte_us: _Optional[int] = ..., pause_us: _Optional[int] = ..., total_us: _Optional[int] = ..., encoding: _Optional[str] = ..., source: _Optional[str] = ..., kept_bytes: _Optional[int] = ..., choice: _Optional[str] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PushesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PushesResponse(_message.Message):
    __slots__ = ("receivers",)
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    receivers: _containers.RepeatedCompositeFieldContainer[ReceiverPushes]
    def __init__(self, receivers: _Optional[_Iterable[_Union[ReceiverPushes, _Mapping]]] = ...) -> None: ...

class ReceiverPushes(_message.Message):
    __slots__ = ("member_id", "last", "last_ack_us", "reported_unix_ms", "count", "errors", "last_error", "last_error_policy", "last_error_unix_ms", "first_byte_us", "last_byte_us", "pause_us", "total_us", "ack_us", "bytes")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LAST_ACK_US_FIELD_NUMBER: _ClassVar[int]
    REPORTED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_POLICY_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_US_FIELD_NUMBER: _ClassVar[int]
    LAST_BYTE_US_FIELD_NUMBER: _ClassVar[int]
    PAUSE_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    ACK_US_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    last: SwapReport
    last_ack_us: int
    reported_unix_ms: int
    count: int
    errors: int
    last_error: str
    last_error_policy: _trajectory_pb2.PolicyVersion
    last_error_unix_ms: int
    first_byte_us: Percentiles
    last_byte_us: Percentiles
    pause_us: Percentiles
    total_us: Percentiles
    ack_us: Percentiles
    bytes: int
    def __init__(self, member_id: _Optional[str] = ..., last: _Optional[_Union[SwapReport, _Mapping]] = ..., last_ack_us: _Optional[int] = ..., reported_unix_ms: _Optional[int] = ..., count: _Optional[int] = ..., errors: _Optional[int] = ..., last_error: _Optional[str] = ..., last_error_policy: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., last_error_unix_ms: _Optional[int] = ..., first_byte_us: _Optional[_Union[Percentiles, _Mapping]] = ..., last_byte_us: _Optional[_Union[Percentiles, _Mapping]] = ..., pause_us: _Optional[_Union[Percentiles, _Mapping]] = ..., total_us: _Optional[_Union[Percentiles, _Mapping]] = ..., ack_us: _Optional[_Union[Percentiles, _Mapping]] = ..., bytes: _Optional[int] = ...) -> None: ...

class Percentiles(_message.Message):
    __slots__ = ("p50", "p99")
    P50_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    p50: float
    p99: float
    def __init__(self, p50: _Optional[float] = ..., p99: _Optional[float] = ...) -> None: ...
