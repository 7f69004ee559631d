"""Checks of a written member before it reaches the store: malformed data is refused here, with its field named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from rollmesh.buffer.policy.version_ranges import VersionRanges
from rollmesh.buffer.protocol.limits import (
    MAX_PIECES,
    MAX_WHOLE_BYTES,
    MESSAGE_MEMBERS,
    MESSAGE_PAYLOAD_BYTES,
    META_BYTES,
)
from rollmesh.buffer.protocol.side_data import check_digest, check_side
from rollmesh.buffer.server.request_validation import check_group_id
from rollmesh.buffer.store.payloads import digest_of
from rollmesh.buffer.store.records import Write
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.text import REASON_CHARACTERS, bounded
from rollmesh.mesh.trajectory.payload_codec import PayloadInfo, inspect
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import trajectory_pb2 as trajectory

_OUTCOMES = frozenset({trajectory.OUTCOME_SCORED, trajectory.OUTCOME_UNSCORABLE, trajectory.OUTCOME_ERROR})


def check_message(members: int, payload_bytes: int) -> None:
    """Refuses a message that would keep others waiting.

    Raises:
        PayloadError: it has too many members, or too many bytes of payloads.
    """
    if members > MESSAGE_MEMBERS:
        raise PayloadError(
            "writes", f"{members} members, a message may have {MESSAGE_MEMBERS}", hint="send them in several messages"
        )
    if payload_bytes > MESSAGE_PAYLOAD_BYTES:
        raise PayloadError(
            "payloads",
            f"{payload_bytes} bytes, a message may have {MESSAGE_PAYLOAD_BYTES}",
            hint="send the members in several messages, and large payloads by Upload",
        )


def check_write(write: pb.MemberWrite, payload: bytes) -> Write:
    """Checks a write and its payload, which came next to the message; returns it in the form of the store.

    Raises:
        PayloadError: naming the field that is wrong.
    """
    group_id, meta = write.group_id, write.meta  # once: every look at a field costs as much as a check
    check_group_id("group_id", group_id)
    if write.draft:
        return _draft(write, payload)
    outcome = meta.outcome
    if outcome not in _OUTCOMES:
        raise PayloadError("meta.outcome", f"expected scored, unscorable or error, got {outcome}")
    pieces = write.pieces
    size, tokens, ranges, reason, digest = len(payload), 0, "", "", ""
    if scored := outcome == trajectory.OUTCOME_SCORED:
        if pieces:
            size, digest = write.uploaded_bytes, check_digest("uploaded_digest", write.uploaded_digest)
        else:
            digest = digest_of(payload)
        tokens, ranges = _check_scored(meta, payload, pieces, size)
    else:
        _check_unscored(payload, pieces)
        reason = meta.reason = bounded(meta.reason, REASON_CHARACTERS)
    if side := meta.side:
        check_side(side)
    serialized = meta.SerializeToString()
    if len(serialized) > META_BYTES:
        raise PayloadError(
            "meta",
            f"{len(serialized)} bytes, a member may have {META_BYTES}",
            hint="return fewer reward components and metrics, under shorter names",
        )
    return Write(
        group_id, write.lease_id, write.attempt, meta.member, scored, payload, ranges,
        serialized, size, pieces, tokens, reason, digest=digest, side=side,
    )  # fmt: skip


def _draft(write: pb.MemberWrite, payload: bytes) -> Write:
    if write.pieces:
        raise PayloadError("pieces", "a draft travels whole", hint="do not draft so long a member")
    if len(payload) > MAX_WHOLE_BYTES:
        raise PayloadError("payload", f"a draft of {len(payload)} bytes, over {MAX_WHOLE_BYTES}")
    info = inspect(payload)
    return Write(
        group_id=write.group_id,
        lease_id=write.lease_id,
        attempt=write.attempt,
        member=write.meta.member,
        scored=False,
        payload=payload,
        ranges=_span(info.versions.versions)[0],
        meta=b"",
        size=len(payload),
        tokens=info.response_tokens,
        draft=True,
        digest=digest_of(payload),
    )


@lru_cache(maxsize=4096)
def _span(versions: tuple[PolicyVersion, ...]) -> tuple[str, PolicyVersion, PolicyVersion]:
    """Ranges as the scripts read them, the oldest and the newest version; few combinations are met at a time."""
    runs = VersionRuns(tuple((1, version) for version in versions))
    return str(VersionRanges.of(versions)), runs.oldest, runs.newest


def _check_unscored(payload: bytes, pieces: int) -> None:
    if payload:
        raise PayloadError("payload", "must be empty unless the outcome is scored")
    if pieces:
        raise PayloadError("pieces", "must be 0 unless the outcome is scored")


def _inspect(payload: bytes, pieces: int, size: int) -> PayloadInfo:
    if not pieces:
        if size > MAX_WHOLE_BYTES:
            raise PayloadError(
                "payload", f"{size} bytes, over {MAX_WHOLE_BYTES}", hint="upload it in pieces before the write"
            )
        return inspect(payload)
    if not 2 <= pieces <= MAX_PIECES:
        raise PayloadError("pieces", f"expected 2 to {MAX_PIECES}, got {pieces}")
    return inspect(payload, size)


def _check_scored(meta: trajectory.MemberMeta, payload: bytes, pieces: int, size: int) -> tuple[int, str]:
    """Response tokens and version ranges; `size` is that of the whole payload."""
    tokens, versions, _ = _inspect(payload, pieces, size)
    if meta.response_tokens != tokens:
        raise PayloadError("meta.response_tokens", f"{meta.response_tokens}, but the payload holds {tokens}")
    if meta.prompt_tokens == 0:
        raise PayloadError("meta.prompt_tokens", "must be at least 1")
    if not math.isfinite(meta.reward):
        raise PayloadError("meta.reward", f"must be finite, got {meta.reward}")
    if components := meta.components:
        _check_finite("components", components)
    if metrics := meta.metrics:
        _check_finite("metrics", metrics)
    ranges, oldest, newest = _span(versions.versions)
    _check_version("oldest", meta.oldest, oldest)
    _check_version("newest", meta.newest, newest)
    return tokens, ranges


def _check_finite(field: str, numbers: Mapping[str, float]) -> None:
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise PayloadError(f"meta.{field}.{bounded(name, 80)}", f"must be finite, got {value}")


def _check_version(name: str, claimed: trajectory.PolicyVersion, true: PolicyVersion) -> None:
    if (claimed.incarnation, claimed.version) != true:
        raise PayloadError(f"meta.{name}", f"{PolicyVersion.from_proto(claimed)}, but the payload says {true}")
