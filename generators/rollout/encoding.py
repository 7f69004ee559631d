"""Sampled tokens in the form in which the buffer stores them, and back."""

from __future__ import annotations

import numpy as np

from rollmesh.buffer.client.client import Outgoing
from rollmesh.generators.engines.interface import GenerationResult, SampledTokens
from rollmesh.generators.rollout.active_group import HeldGroup
from rollmesh.mesh.trajectory.payload_codec import Codec, Trajectory, encode
from rollmesh.protos import buffer_pb2, trajectory_pb2


def pack(sampled: GenerationResult | SampledTokens, *, codec: Codec = "none", level: int = 1) -> bytes:
    """The payload of a response, or of the beginning of one.

    Args:
        sampled: at least one token.
        codec, level: see `mesh.trajectory.payload_codec.encode`.
    """
    mask = sampled.mask
    return encode(
        Trajectory(
            response_ids=sampled.response_ids,
            log_probs=sampled.log_probs,
            response_mask=np.ones(len(sampled.response_ids), np.uint8) if mask is None else mask,
            versions=sampled.versions,
        ),
        codec=codec,
        level=level,
    )


def member_write(group: HeldGroup, meta: trajectory_pb2.MemberMeta, payload: bytes, *, draft: bool = False) -> Outgoing:
    """What is written of a member, in the name of the lease under which its group is held."""
    head = buffer_pb2.MemberWrite(
        group_id=group.group_id,
        lease_id=group.grant.lease_id,
        attempt=group.grant.attempt,
        meta=meta,
        draft=draft,
    )
    return Outgoing(head, payload)
