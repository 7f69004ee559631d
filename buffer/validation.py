"""What is checked of a written member before it reaches the store: malformed data stops here, with its field named."""

from __future__ import annotations

import math
from functools import lru_cache

from buffer.policy.lineage import VersionRanges
from buffer.store import Write
from mesh.errors import PayloadError
from mesh.trajectory import inspect
from mesh.versions import PolicyVersion
from protos import buffer_pb2 as pb
from protos import trajectory_pb2 as trajectory

_OUTCOMES = frozenset({trajectory.OUTCOME_SCORED, trajectory.OUTCOME_UNSCORABLE, trajectory.OUTCOME_ERROR})


def check_write(write: pb.MemberWrite) -> Write:
    """The write as the store takes it.

    Raises:
        PayloadError: naming the field that is wrong.
    """
    meta = write.meta
    if not write.group_id or "|" in write.group_id:
        raise PayloadError("group_id", f"not a group id: {write.group_id!r}")
    if meta.outcome not in _OUTCOMES:
        raise PayloadError("meta.outcome", f"expected scored, unscorable or error, got {meta.outcome}")
    scored = meta.outcome == trajectory.OUTCOME_SCORED
    ranges = _check_scored(meta, write.payload) if scored else _check_unscored(write.payload)
    return Write(
        write.group_id, write.lease_id, write.attempt, meta.member, scored, write.payload, ranges,
        meta.SerializeToString(),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _ranges(runs: tuple[tuple[int, PolicyVersion], ...]) -> str:
    return str(VersionRanges.of(version for _, version in runs))


def _check_unscored(payload: bytes) -> str:
    if payload:
        raise PayloadError("payload", "must be empty unless the outcome is scored")
    return ""


def _check_scored(meta: trajectory.MemberMeta, payload: bytes) -> str:
    info = inspect(payload)
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
    for name, wire, true in (
        ("oldest", meta.oldest, info.versions.oldest),
        ("newest", meta.newest, info.versions.newest),
    ):
        if wire.incarnation != true.incarnation or wire.version != true.version:
            raise PayloadError(f"meta.{name}", f"{PolicyVersion.from_proto(wire)}, but the payload says {true}")
    return _ranges(info.versions.runs)
