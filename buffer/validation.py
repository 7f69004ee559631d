"""What is checked of a written member before it reaches the store: malformed data stops here, with its field named."""

from __future__ import annotations

import math
from functools import lru_cache

from buffer.limits import MAX_PIECES, MAX_WHOLE_BYTES
from buffer.policy.lineage import VersionRanges
from buffer.records import Write
from buffer.side_data import check_side
from mesh.errors import PayloadError
from mesh.trajectory import PayloadInfo, inspect
from mesh.versions import PolicyVersion, VersionRuns
from protos import buffer_pb2 as pb
from protos import trajectory_pb2 as trajectory

# A reason is kept, with a failed group or among the counted ones, up to this length.
REASON_CHARACTERS = 300
_OUTCOMES = frozenset({trajectory.OUTCOME_SCORED, trajectory.OUTCOME_UNSCORABLE, trajectory.OUTCOME_ERROR})


def check_write(write: pb.MemberWrite) -> Write:
    """The write as the store takes it.

    Raises:
        PayloadError: naming the field that is wrong.
    """
    meta = write.meta
    if not write.group_id or "|" in write.group_id:
        raise PayloadError("group_id", f"not a group id: {write.group_id!r}")
    if write.draft:
        return _draft(write)
    if meta.outcome not in _OUTCOMES:
        raise PayloadError("meta.outcome", f"expected scored, unscorable or error, got {meta.outcome}")
    scored = meta.outcome == trajectory.OUTCOME_SCORED
    payload = write.payload  # once: every look at it is a copy
    ranges = _check_scored(meta, write, payload) if scored else _check_unscored(write)
    if meta.side:
        check_side(meta.side)
    return Write(
        write.group_id, write.lease_id, write.attempt, meta.member, scored, payload, ranges,
        meta.SerializeToString(), write.uploaded_bytes if write.pieces else len(payload), write.pieces,
        meta.response_tokens if scored else 0, meta.reason[:REASON_CHARACTERS],
    )  # fmt: skip


def _draft(write: pb.MemberWrite) -> Write:
    if write.pieces:
        raise PayloadError("pieces", "a draft travels whole", hint="draft so long a member no more")
    if len(write.payload) > MAX_WHOLE_BYTES:
        raise PayloadError("payload", f"a draft of {len(write.payload)} bytes, over {MAX_WHOLE_BYTES}")
    info = inspect(write.payload)
    return Write(
        group_id=write.group_id,
        lease_id=write.lease_id,
        attempt=write.attempt,
        member=write.meta.member,
        scored=False,
        payload=write.payload,
        ranges=_span(info.versions.versions)[0],
        meta=b"",
        size=len(write.payload),
        tokens=info.response_tokens,
        draft=True,
    )


@lru_cache(maxsize=4096)
def _span(versions: tuple[PolicyVersion, ...]) -> tuple[str, PolicyVersion, PolicyVersion]:
    """Ranges as the verbs read them, the oldest and the newest version; few combinations are met at a time."""
    runs = VersionRuns(tuple((1, version) for version in versions))
    return str(VersionRanges.of(versions)), runs.oldest, runs.newest


def _check_unscored(write: pb.MemberWrite) -> str:
    if write.payload:
        raise PayloadError("payload", "must be empty unless the outcome is scored")
    if write.pieces:
        raise PayloadError("pieces", "must be 0 unless the outcome is scored")
    return ""


def _inspect(write: pb.MemberWrite, payload: bytes) -> PayloadInfo:
    pieces = write.pieces
    if not pieces:
        if len(payload) > MAX_WHOLE_BYTES:
            raise PayloadError(
                "payload", f"{len(payload)} bytes, over {MAX_WHOLE_BYTES}", hint="upload it in pieces before the write"
            )
        return inspect(payload)
    if not 2 <= pieces <= MAX_PIECES:
        raise PayloadError("pieces", f"expected 2 to {MAX_PIECES}, got {pieces}")
    return inspect(payload, write.uploaded_bytes)


def _check_scored(meta: trajectory.MemberMeta, write: pb.MemberWrite, payload: bytes) -> str:
    info = _inspect(write, payload)
    if meta.response_tokens != info.response_tokens:
        raise PayloadError(
            "meta.response_tokens", f"{meta.response_tokens}, but the payload holds {info.response_tokens}"
        )
    if meta.prompt_tokens == 0:
        raise PayloadError("meta.prompt_tokens", "must be at least 1")
    if not math.isfinite(meta.reward):
        raise PayloadError("meta.reward", f"must be finite, got {meta.reward}")
    for name, value in meta.components.items():
        if not math.isfinite(value):
            raise PayloadError(f"meta.components.{name}", f"must be finite, got {value}")
    ranges, oldest, newest = _span(info.versions.versions)
    for name, wire, true in (("oldest", meta.oldest, oldest), ("newest", meta.newest, newest)):
        if wire.incarnation != true.incarnation or wire.version != true.version:
            raise PayloadError(f"meta.{name}", f"{PolicyVersion.from_proto(wire)}, but the payload says {true}")
    return ranges
