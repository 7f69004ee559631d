"""Ids of traces and spans, computed from the ids that the mesh has anyway.

Invariants: all services compute the same trace id for one trajectory, so nothing has to travel with it. All attempts
at a member belong to the same trace. The id alone decides if a trace is kept, so all services keep the same ones.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollmesh.mesh.trajectory.versions import PolicyVersion

ROOT = "trajectory"
"""Name of the span that all others of a trajectory lie in."""
STEP = "step"
"""Name of the span that all others of a version lie in."""
# W3C Trace Context, level 2: the last 56 bits of a trace id are random.
_RANDOM_BITS = 56


def trajectory_trace(run: str, group_id: str, member: int) -> int:
    """The trace of a member of a group: 128 bits, not 0."""
    return _hashed(16, "trajectory", run, group_id, str(member))


def version_trace(run: str, policy: PolicyVersion) -> int:
    """The trace of a version: the step that made it, its publication, and its way to the generators."""
    return _hashed(16, "version", run, str(policy.incarnation), str(policy.version))


def span_of(trace_id: int, name: str, number: int | str = 0) -> int:
    """The id of a span: 64 bits, not 0. One that is reported twice has one id.

    Args:
        number: sets spans of one name apart: the attempt, the use, or who reports.
    """
    return _hashed(8, "span", f"{trace_id:x}", name, str(number))


def is_kept(trace_id: int, share: float) -> bool:
    """True for a share of all traces (0 .. 1), the same ones everywhere; those of a smaller share are among them."""
    return (trace_id & ((1 << _RANDOM_BITS) - 1)) < share * (1 << _RANDOM_BITS)


def _hashed(size: int, *parts: str) -> int:
    # A name cannot contain the separator, and so imitate two.
    text = "\0".join(parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=size).digest()) or 1
