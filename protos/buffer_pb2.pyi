from rollmesh.protos import trajectory_pb2 as _trajectory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WriteStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WRITE_STATUS_UNSPECIFIED: _ClassVar[WriteStatus]
    WRITE_STATUS_STORED: _ClassVar[WriteStatus]
    WRITE_STATUS_DUPLICATE: _ClassVar[WriteStatus]
    WRITE_STATUS_SUPERSEDED: _ClassVar[WriteStatus]
    WRITE_STATUS_REJECTED: _ClassVar[WriteStatus]

class NackDisposition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NACK_DISPOSITION_UNSPECIFIED: _ClassVar[NackDisposition]
    NACK_DISPOSITION_RELEASE: _ClassVar[NackDisposition]
    NACK_DISPOSITION_FILTER: _ClassVar[NackDisposition]
    NACK_DISPOSITION_FAIL: _ClassVar[NackDisposition]
WRITE_STATUS_UNSPECIFIED: WriteStatus
WRITE_STATUS_STORED: WriteStatus
WRITE_STATUS_DUPLICATE: WriteStatus
WRITE_STATUS_SUPERSEDED: WriteStatus
WRITE_STATUS_REJECTED: WriteStatus
NACK_DISPOSITION_UNSPECIFIED: NackDisposition
NACK_DISPOSITION_RELEASE: NackDisposition
NACK_DISPOSITION_FILTER: NackDisposition
NACK_DISPOSITION_FAIL: NackDisposition

class SeedRequest(_message.Message):
    __slots__ = ("table", "incarnation", "tasks", "end_of_data", "withdraw_pending", "call")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    END_OF_DATA_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_PENDING_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    table: str
    incarnation: int
    tasks: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.PromptTask]
    end_of_data: bool
    withdraw_pending: bool
    call: int
    def __init__(self, table: _Optional[str] = ..., incarnation: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[_trajectory_pb2.PromptTask, _Mapping]]] = ..., end_of_data: _Optional[bool] = ..., withdraw_pending: _Optional[bool] = ..., call: _Optional[int] = ...) -> None: ...

class SeedResponse(_message.Message):
    __slots__ = ("added", "seeded", "pending", "withdrawn")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    SEEDED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    added: int
    seeded: int
    pending: int
    withdrawn: int
    def __init__(self, added: _Optional[int] = ..., seeded: _Optional[int] = ..., pending: _Optional[int] = ..., withdrawn: _Optional[int] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("table", "member_id", "generation", "credits", "serving", "outstanding", "received", "inventory")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    table: str
    member_id: str
    generation: int
    credits: int
    serving: _trajectory_pb2.PolicyVersion
    outstanding: int
    received: int
    inventory: Inventory
    def __init__(self, table: _Optional[str] = ..., member_id: _Optional[str] = ..., generation: _Optional[int] = ..., credits: _Optional[int] = ..., serving: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., outstanding: _Optional[int] = ..., received: _Optional[int] = ..., inventory: _Optional[_Union[Inventory, _Mapping]] = ...) -> None: ...

class Inventory(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseRef]
    def __init__(self, leases: _Optional[_Iterable[_Union[LeaseRef, _Mapping]]] = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ("grants", "waiting_reason", "cancelled", "inventory_within_ms")
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REASON_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    grants: _containers.RepeatedCompositeFieldContainer[GroupGrant]
    waiting_reason: str
    cancelled: _containers.RepeatedCompositeFieldContainer[LeaseRef]
    inventory_within_ms: int
    def __init__(self, grants: _Optional[_Iterable[_Union[GroupGrant, _Mapping]]] = ..., waiting_reason: _Optional[str] = ..., cancelled: _Optional[_Iterable[_Union[LeaseRef, _Mapping]]] = ..., inventory_within_ms: _Optional[int] = ...) -> None: ...

class GroupGrant(_message.Message):
    __slots__ = ("group_id", "lease_id", "attempt", "lease_term_ms", "task", "members_done", "version_floor", "parent_group_id", "drafts")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LEASE_TERM_MS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_DONE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FLOOR_FIELD_NUMBER: _ClassVar[int]
    PARENT_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    lease_id: str
    attempt: int
    lease_term_ms: int
    task: _trajectory_pb2.PromptTask
    members_done: _containers.RepeatedScalarFieldContainer[int]
    version_floor: int
    parent_group_id: str
    drafts: _containers.RepeatedCompositeFieldContainer[MemberDraft]
    def __init__(self, group_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., attempt: _Optional[int] = ..., lease_term_ms: _Optional[int] = ..., task: _Optional[_Union[_trajectory_pb2.PromptTask, _Mapping]] = ..., members_done: _Optional[_Iterable[int]] = ..., version_floor: _Optional[int] = ..., parent_group_id: _Optional[str] = ..., drafts: _Optional[_Iterable[_Union[MemberDraft, _Mapping]]] = ...) -> None: ...

class MemberDraft(_message.Message):
    __slots__ = ("member", "payload")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    member: int
    payload: bytes
    def __init__(self, member: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("table", "member_id", "generation", "writes", "sequence", "payloads")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    table: str
    member_id: str
    generation: int
    writes: _containers.RepeatedCompositeFieldContainer[MemberWrite]
    sequence: int
    payloads: bytes
    def __init__(self, table: _Optional[str] = ..., member_id: _Optional[str] = ..., generation: _Optional[int] = ..., writes: _Optional[_Iterable[_Union[MemberWrite, _Mapping]]] = ..., sequence: _Optional[int] = ..., payloads: _Optional[bytes] = ...) -> None: ...

class MemberWrite(_message.Message):
    __slots__ = ("group_id", "lease_id", "attempt", "meta", "draft", "pieces", "uploaded_bytes", "payload_bytes", "uploaded_digest")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    META_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    UPLOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPLOADED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    lease_id: str
    attempt: int
    meta: _trajectory_pb2.MemberMeta
    draft: bool
    pieces: int
    uploaded_bytes: int
    payload_bytes: int
    uploaded_digest: str
    def __init__(self, group_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., attempt: _Optional[int] = ..., meta: _Optional[_Union[_trajectory_pb2.MemberMeta, _Mapping]] = ..., draft: _Optional[bool] = ..., pieces: _Optional[int] = ..., uploaded_bytes: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., uploaded_digest: _Optional[str] = ...) -> None: ...

class UploadRequest(_message.Message):
    __slots__ = ("table", "group_id", "lease_id", "attempt", "member", "side", "piece", "data", "digest")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    table: str
    group_id: str
    lease_id: str
    attempt: int
    member: int
    side: str
    piece: int
    data: bytes
    digest: str
    def __init__(self, table: _Optional[str] = ..., group_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., attempt: _Optional[int] = ..., member: _Optional[int] = ..., side: _Optional[str] = ..., piece: _Optional[int] = ..., data: _Optional[bytes] = ..., digest: _Optional[str] = ...) -> None: ...

class UploadResponse(_message.Message):
    __slots__ = ("pieces", "bytes")
    PIECES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    pieces: int
    bytes: int
    def __init__(self, pieces: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class WriteResult(_message.Message):
    __slots__ = ("position", "field", "message", "sealed")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    position: int
    field: str
    message: str
    sealed: bool
    def __init__(self, position: _Optional[int] = ..., field: _Optional[str] = ..., message: _Optional[str] = ..., sealed: _Optional[bool] = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("sequence", "statuses", "results")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    statuses: _containers.RepeatedScalarFieldContainer[WriteStatus]
    results: _containers.RepeatedCompositeFieldContainer[WriteResult]
    def __init__(self, sequence: _Optional[int] = ..., statuses: _Optional[_Iterable[_Union[WriteStatus, str]]] = ..., results: _Optional[_Iterable[_Union[WriteResult, _Mapping]]] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("table", "incarnation", "credits", "for_version", "with_payloads", "received", "inventory")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    FOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    WITH_PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    table: str
    incarnation: int
    credits: int
    for_version: int
    with_payloads: bool
    received: int
    inventory: Inventory
    def __init__(self, table: _Optional[str] = ..., incarnation: _Optional[int] = ..., credits: _Optional[int] = ..., for_version: _Optional[int] = ..., with_payloads: _Optional[bool] = ..., received: _Optional[int] = ..., inventory: _Optional[_Union[Inventory, _Mapping]] = ...) -> None: ...

class SampleResponse(_message.Message):
    __slots__ = ("groups", "waiting_reason", "exhausted", "payloads", "lost", "inventory_within_ms")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REASON_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[LeasedGroup]
    waiting_reason: str
    exhausted: bool
    payloads: bytes
    lost: _containers.RepeatedCompositeFieldContainer[LeaseRef]
    inventory_within_ms: int
    def __init__(self, groups: _Optional[_Iterable[_Union[LeasedGroup, _Mapping]]] = ..., waiting_reason: _Optional[str] = ..., exhausted: _Optional[bool] = ..., payloads: _Optional[bytes] = ..., lost: _Optional[_Iterable[_Union[LeaseRef, _Mapping]]] = ..., inventory_within_ms: _Optional[int] = ...) -> None: ...

class LeasedGroup(_message.Message):
    __slots__ = ("group_id", "lease_id", "for_version", "task", "members", "payload_bytes", "attempt", "generating_ms", "queued_ms", "use", "probability", "priority", "pieces")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GENERATING_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_MS_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    lease_id: str
    for_version: int
    task: _trajectory_pb2.PromptTask
    members: _containers.RepeatedCompositeFieldContainer[_trajectory_pb2.MemberMeta]
    payload_bytes: _containers.RepeatedScalarFieldContainer[int]
    attempt: int
    generating_ms: int
    queued_ms: int
    use: int
    probability: float
    priority: float
    pieces: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., for_version: _Optional[int] = ..., task: _Optional[_Union[_trajectory_pb2.PromptTask, _Mapping]] = ..., members: _Optional[_Iterable[_Union[_trajectory_pb2.MemberMeta, _Mapping]]] = ..., payload_bytes: _Optional[_Iterable[int]] = ..., attempt: _Optional[int] = ..., generating_ms: _Optional[int] = ..., queued_ms: _Optional[int] = ..., use: _Optional[int] = ..., probability: _Optional[float] = ..., priority: _Optional[float] = ..., pieces: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("table", "members")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    table: str
    members: _containers.RepeatedCompositeFieldContainer[MemberRef]
    def __init__(self, table: _Optional[str] = ..., members: _Optional[_Iterable[_Union[MemberRef, _Mapping]]] = ...) -> None: ...

class MemberRef(_message.Message):
    __slots__ = ("group_id", "member", "side")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SIDE_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    member: int
    side: str
    def __init__(self, group_id: _Optional[str] = ..., member: _Optional[int] = ..., side: _Optional[str] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("payloads", "continues")
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    continues: bool
    def __init__(self, payloads: _Optional[_Iterable[bytes]] = ..., continues: _Optional[bool] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("table", "incarnation", "train_version", "leases")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRAIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    table: str
    incarnation: int
    train_version: int
    leases: _containers.RepeatedCompositeFieldContainer[LeaseRef]
    def __init__(self, table: _Optional[str] = ..., incarnation: _Optional[int] = ..., train_version: _Optional[int] = ..., leases: _Optional[_Iterable[_Union[LeaseRef, _Mapping]]] = ...) -> None: ...

class LeaseRef(_message.Message):
    __slots__ = ("group_id", "lease_id")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    lease_id: str
    def __init__(self, group_id: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("group_id", "reason", "lease_id")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    reason: str
    lease_id: str
    def __init__(self, group_id: _Optional[str] = ..., reason: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("claimed", "refused", "checkpoint_wanted")
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_WANTED_FIELD_NUMBER: _ClassVar[int]
    claimed: bool
    refused: _containers.RepeatedCompositeFieldContainer[Refusal]
    checkpoint_wanted: bool
    def __init__(self, claimed: _Optional[bool] = ..., refused: _Optional[_Iterable[_Union[Refusal, _Mapping]]] = ..., checkpoint_wanted: _Optional[bool] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("table", "incarnation", "version", "checkpoint")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    table: str
    incarnation: int
    version: int
    checkpoint: str
    def __init__(self, table: _Optional[str] = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("trained",)
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    trained: int
    def __init__(self, trained: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("table", "member_id", "resume_version", "takeover", "force", "call")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_VERSION_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    table: str
    member_id: str
    resume_version: int
    takeover: bool
    force: bool
    call: int
    def __init__(self, table: _Optional[str] = ..., member_id: _Optional[str] = ..., resume_version: _Optional[int] = ..., takeover: _Optional[bool] = ..., force: _Optional[bool] = ..., call: _Optional[int] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("incarnation", "trained", "returned", "evicted_stale", "seeded")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_STALE_FIELD_NUMBER: _ClassVar[int]
    SEEDED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    trained: int
    returned: int
    evicted_stale: int
    seeded: int
    def __init__(self, incarnation: _Optional[int] = ..., trained: _Optional[int] = ..., returned: _Optional[int] = ..., evicted_stale: _Optional[int] = ..., seeded: _Optional[int] = ...) -> None: ...

class NackRequest(_message.Message):
    __slots__ = ("table", "incarnation", "leases", "disposition", "reason")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    DISPOSITION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    table: str
    incarnation: int
    leases: _containers.RepeatedCompositeFieldContainer[LeaseRef]
    disposition: NackDisposition
    reason: str
    def __init__(self, table: _Optional[str] = ..., incarnation: _Optional[int] = ..., leases: _Optional[_Iterable[_Union[LeaseRef, _Mapping]]] = ..., disposition: _Optional[_Union[NackDisposition, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class NackResponse(_message.Message):
    __slots__ = ("changed",)
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: int
    def __init__(self, changed: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("table", "member_id", "generation", "leases")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    table: str
    member_id: str
    generation: int
    leases: _containers.RepeatedCompositeFieldContainer[LeaseRef]
    def __init__(self, table: _Optional[str] = ..., member_id: _Optional[str] = ..., generation: _Optional[int] = ..., leases: _Optional[_Iterable[_Union[LeaseRef, _Mapping]]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: int
    def __init__(self, released: _Optional[int] = ...) -> None: ...

class SetPrioritiesRequest(_message.Message):
    __slots__ = ("table", "incarnation", "priorities", "call")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    table: str
    incarnation: int
    priorities: _containers.RepeatedCompositeFieldContainer[GroupPriority]
    call: int
    def __init__(self, table: _Optional[str] = ..., incarnation: _Optional[int] = ..., priorities: _Optional[_Iterable[_Union[GroupPriority, _Mapping]]] = ..., call: _Optional[int] = ...) -> None: ...

class GroupPriority(_message.Message):
    __slots__ = ("group_id", "priority")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    priority: float
    def __init__(self, group_id: _Optional[str] = ..., priority: _Optional[float] = ...) -> None: ...

class SetPrioritiesResponse(_message.Message):
    __slots__ = ("changed",)
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: int
    def __init__(self, changed: _Optional[int] = ...) -> None: ...

class ReassertRequest(_message.Message):
    __slots__ = ("table", "incarnation", "member_id", "version", "committed", "checkpoint", "takeovers", "uses", "more", "doubt")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    TAKEOVERS_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    DOUBT_FIELD_NUMBER: _ClassVar[int]
    table: str
    incarnation: int
    member_id: str
    version: int
    committed: int
    checkpoint: str
    takeovers: _containers.RepeatedCompositeFieldContainer[Takeover]
    uses: _containers.RepeatedCompositeFieldContainer[AssertedUse]
    more: bool
    doubt: int
    def __init__(self, table: _Optional[str] = ..., incarnation: _Optional[int] = ..., member_id: _Optional[str] = ..., version: _Optional[int] = ..., committed: _Optional[int] = ..., checkpoint: _Optional[str] = ..., takeovers: _Optional[_Iterable[_Union[Takeover, _Mapping]]] = ..., uses: _Optional[_Iterable[_Union[AssertedUse, _Mapping]]] = ..., more: _Optional[bool] = ..., doubt: _Optional[int] = ...) -> None: ...

class Takeover(_message.Message):
    __slots__ = ("incarnation", "resumed_at")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RESUMED_AT_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    resumed_at: int
    def __init__(self, incarnation: _Optional[int] = ..., resumed_at: _Optional[int] = ...) -> None: ...

class AssertedUse(_message.Message):
    __slots__ = ("group_id", "train_version", "ordinal")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TRAIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    train_version: int
    ordinal: int
    def __init__(self, group_id: _Optional[str] = ..., train_version: _Optional[int] = ..., ordinal: _Optional[int] = ...) -> None: ...

class ReassertResponse(_message.Message):
    __slots__ = ("corrected", "unknown", "doubt")
    CORRECTED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    DOUBT_FIELD_NUMBER: _ClassVar[int]
    corrected: int
    unknown: int
    doubt: int
    def __init__(self, corrected: _Optional[int] = ..., unknown: _Optional[int] = ..., doubt: _Optional[int] = ...) -> None: ...

class RedriveRequest(_message.Message):
    __slots__ = ("table", "group_ids")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    GROUP_IDS_FIELD_NUMBER: _ClassVar[int]
    table: str
    group_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, table: _Optional[str] = ..., group_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RedriveResponse(_message.Message):
    __slots__ = ("redriven", "unknown")
    REDRIVEN_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    redriven: int
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, redriven: _Optional[int] = ..., unknown: _Optional[_Iterable[str]] = ...) -> None: ...

class SetPolicyVersionRequest(_message.Message):
    __slots__ = ("incarnation", "version")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    version: int
    def __init__(self, incarnation: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class SetPolicyVersionResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("table",)
    TABLE_FIELD_NUMBER: _ClassVar[int]
    table: str
    def __init__(self, table: _Optional[str] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("table", "policy", "next_train_version", "groups_per_step", "max_staleness", "counts", "waiting_for_inserts_ms", "waiting_for_samples_ms", "latest_checkpoint", "bytes", "learner_waits", "generators_wait", "learner_lease_ms", "committed_version", "seeded", "end_of_data", "oldest_ready_ms", "oldest_generating_ms", "consumed_bytes", "reserved_bytes", "evicted_by_tokens", "orphans_swept", "max_reuse", "order", "leases", "dead_letters", "redis_used_bytes", "redis_max_bytes", "unmoved_ms", "moved_unix_ms", "generators", "generators_serving", "generators_loading", "sampled_tokens", "unheld")
    class EvictedByTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    TABLE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    NEXT_TRAIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_INSERTS_MS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_SAMPLES_MS_FIELD_NUMBER: _ClassVar[int]
    LATEST_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LEARNER_WAITS_FIELD_NUMBER: _ClassVar[int]
    GENERATORS_WAIT_FIELD_NUMBER: _ClassVar[int]
    LEARNER_LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_VERSION_FIELD_NUMBER: _ClassVar[int]
    SEEDED_FIELD_NUMBER: _ClassVar[int]
    END_OF_DATA_FIELD_NUMBER: _ClassVar[int]
    OLDEST_READY_MS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_GENERATING_MS_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_SWEPT_FIELD_NUMBER: _ClassVar[int]
    MAX_REUSE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    DEAD_LETTERS_FIELD_NUMBER: _ClassVar[int]
    REDIS_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REDIS_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNMOVED_MS_FIELD_NUMBER: _ClassVar[int]
    MOVED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    GENERATORS_FIELD_NUMBER: _ClassVar[int]
    GENERATORS_SERVING_FIELD_NUMBER: _ClassVar[int]
    GENERATORS_LOADING_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNHELD_FIELD_NUMBER: _ClassVar[int]
    table: str
    policy: _trajectory_pb2.PolicyVersion
    next_train_version: int
    groups_per_step: int
    max_staleness: int
    counts: LedgerCounts
    waiting_for_inserts_ms: int
    waiting_for_samples_ms: int
    latest_checkpoint: str
    bytes: int
    learner_waits: str
    generators_wait: str
    learner_lease_ms: int
    committed_version: int
    seeded: int
    end_of_data: bool
    oldest_ready_ms: int
    oldest_generating_ms: int
    consumed_bytes: int
    reserved_bytes: int
    evicted_by_tokens: _containers.ScalarMap[int, int]
    orphans_swept: int
    max_reuse: int
    order: str
    leases: int
    dead_letters: int
    redis_used_bytes: int
    redis_max_bytes: int
    unmoved_ms: int
    moved_unix_ms: int
    generators: int
    generators_serving: int
    generators_loading: int
    sampled_tokens: int
    unheld: int
    def __init__(self, table: _Optional[str] = ..., policy: _Optional[_Union[_trajectory_pb2.PolicyVersion, _Mapping]] = ..., next_train_version: _Optional[int] = ..., groups_per_step: _Optional[int] = ..., max_staleness: _Optional[int] = ..., counts: _Optional[_Union[LedgerCounts, _Mapping]] = ..., waiting_for_inserts_ms: _Optional[int] = ..., waiting_for_samples_ms: _Optional[int] = ..., latest_checkpoint: _Optional[str] = ..., bytes: _Optional[int] = ..., learner_waits: _Optional[str] = ..., generators_wait: _Optional[str] = ..., learner_lease_ms: _Optional[int] = ..., committed_version: _Optional[int] = ..., seeded: _Optional[int] = ..., end_of_data: _Optional[bool] = ..., oldest_ready_ms: _Optional[int] = ..., oldest_generating_ms: _Optional[int] = ..., consumed_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., evicted_by_tokens: _Optional[_Mapping[int, int]] = ..., orphans_swept: _Optional[int] = ..., max_reuse: _Optional[int] = ..., order: _Optional[str] = ..., leases: _Optional[int] = ..., dead_letters: _Optional[int] = ..., redis_used_bytes: _Optional[int] = ..., redis_max_bytes: _Optional[int] = ..., unmoved_ms: _Optional[int] = ..., moved_unix_ms: _Optional[int] = ..., generators: _Optional[int] = ..., generators_serving: _Optional[int] = ..., generators_loading: _Optional[int] = ..., sampled_tokens: _Optional[int] = ..., unheld: _Optional[int] = ...) -> None: ...

class HoldersRequest(_message.Message):
    __slots__ = ("table", "limit")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    table: str
    limit: int
    def __init__(self, table: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class HoldersResponse(_message.Message):
    __slots__ = ("holders", "total")
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    total: int
    def __init__(self, holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("member_id", "role", "address", "groups", "oldest_group_id", "held_ms", "heartbeat_age_ms", "lease_ms", "stream_open", "waiting_reason")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    HELD_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    STREAM_OPEN_FIELD_NUMBER: _ClassVar[int]
    WAITING_REASON_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    role: str
    address: str
    groups: int
    oldest_group_id: str
    held_ms: int
    heartbeat_age_ms: int
    lease_ms: int
    stream_open: bool
    waiting_reason: str
    def __init__(self, member_id: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., groups: _Optional[int] = ..., oldest_group_id: _Optional[str] = ..., held_ms: _Optional[int] = ..., heartbeat_age_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., stream_open: _Optional[bool] = ..., waiting_reason: _Optional[str] = ...) -> None: ...

class LedgerCounts(_message.Message):
    __slots__ = ("admitted", "trained", "evicted_stale", "filtered", "failed", "generating", "ready", "leased", "consumed", "seeded_tasks", "pending", "withdrawn", "first_admissions", "readmissions", "superseded_writes", "duplicate_writes", "reasons", "uses", "redriven", "cancelled")
    class ReasonsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_STALE_FIELD_NUMBER: _ClassVar[int]
    FILTERED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    GENERATING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    SEEDED_TASKS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    FIRST_ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    READMISSIONS_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_WRITES_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_WRITES_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    REDRIVEN_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    admitted: int
    trained: int
    evicted_stale: int
    filtered: int
    failed: int
    generating: int
    ready: int
    leased: int
    consumed: int
    seeded_tasks: int
    pending: int
    withdrawn: int
    first_admissions: int
    readmissions: int
    superseded_writes: int
    duplicate_writes: int
    reasons: _containers.ScalarMap[str, int]
    uses: int
    redriven: int
    cancelled: int
    def __init__(self, admitted: _Optional[int] = ..., trained: _Optional[int] = ..., evicted_stale: _Optional[int] = ..., filtered: _Optional[int] = ..., failed: _Optional[int] = ..., generating: _Optional[int] = ..., ready: _Optional[int] = ..., leased: _Optional[int] = ..., consumed: _Optional[int] = ..., seeded_tasks: _Optional[int] = ..., pending: _Optional[int] = ..., withdrawn: _Optional[int] = ..., first_admissions: _Optional[int] = ..., readmissions: _Optional[int] = ..., superseded_writes: _Optional[int] = ..., duplicate_writes: _Optional[int] = ..., reasons: _Optional[_Mapping[str, int]] = ..., uses: _Optional[int] = ..., redriven: _Optional[int] = ..., cancelled: _Optional[int] = ...) -> None: ...

class LedgerRequest(_message.Message):
    __slots__ = ("table", "failed_limit")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    FAILED_LIMIT_FIELD_NUMBER: _ClassVar[int]
    table: str
    failed_limit: int
    def __init__(self, table: _Optional[str] = ..., failed_limit: _Optional[int] = ...) -> None: ...

class LedgerResponse(_message.Message):
    __slots__ = ("counters", "recounted", "discrepancies", "failed")
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    RECOUNTED_FIELD_NUMBER: _ClassVar[int]
    DISCREPANCIES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    counters: LedgerCounts
    recounted: LedgerCounts
    discrepancies: _containers.RepeatedScalarFieldContainer[str]
    failed: _containers.RepeatedCompositeFieldContainer[FailedGroup]
    def __init__(self, counters: _Optional[_Union[LedgerCounts, _Mapping]] = ..., recounted: _Optional[_Union[LedgerCounts, _Mapping]] = ..., discrepancies: _Optional[_Iterable[str]] = ..., failed: _Optional[_Iterable[_Union[FailedGroup, _Mapping]]] = ...) -> None: ...

class FailedGroup(_message.Message):
    __slots__ = ("group_id", "task_id", "reason", "attempts", "failed_unix_ms", "causes", "ordinal", "redriven")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    CAUSES_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    REDRIVEN_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    task_id: str
    reason: str
    attempts: int
    failed_unix_ms: int
    causes: _containers.RepeatedScalarFieldContainer[str]
    ordinal: int
    redriven: bool
    def __init__(self, group_id: _Optional[str] = ..., task_id: _Optional[str] = ..., reason: _Optional[str] = ..., attempts: _Optional[int] = ..., failed_unix_ms: _Optional[int] = ..., causes: _Optional[_Iterable[str]] = ..., ordinal: _Optional[int] = ..., redriven: _Optional[bool] = ...) -> None: ...
