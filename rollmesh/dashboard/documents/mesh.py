"""The mesh as a picture: generators, reward services, the buffer, the learner, and what moves between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rollmesh.dashboard.live import LiveMesh
from rollmesh.dashboard.run_view import RunView
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2, membership_pb2, trajectory_pb2
from rollmesh.report.member_states import STATES, member_state
from rollmesh.report.table_lines import format_bytes, format_ms, table_lines

# Members of a role that are shown one by one; of more only those that wait or are outdated, and all as cells.
_MOST_CARDS = 8
# Heartbeats of a generator and of the learner may be so far apart, and as many versions are published meanwhile.
_APART_S = 2.0


def mesh_document(view: RunView) -> dict[str, Any] | None:
    """The picture; None where the mesh was not asked, as that of a finished run."""
    mesh = view.mesh
    if mesh is None:
        return None
    newest = mesh.table.policy if mesh.table is not None and mesh.table.HasField("policy") else None
    return {
        "trouble": mesh.trouble,
        "waits": mesh.waits,
        "turns": mesh.turns,
        "version": None if newest is None else str(PolicyVersion.from_proto(newest)),
        "generators": _generators(mesh, _allowed_lag(view, mesh)),
        "rewards": _rewards(mesh),
        "models": _plain(mesh, membership_pb2.ROLE_MODEL),
        "fronts": _plain(mesh, membership_pb2.ROLE_BUFFER),
        "buffer": None if mesh.table is None else _buffer(mesh.table),
        "learner": _learner(mesh),
    }


def _allowed_lag(view: RunView, mesh: LiveMesh) -> int:
    """Versions by which a generator's heartbeat may be older than the learner's while all is well."""
    bound = mesh.table.max_staleness if mesh.table is not None else 0
    return bound + math.ceil(_APART_S * view.steps_per_s())


def _generators(mesh: LiveMesh, allowed_lag: int) -> dict[str, Any]:
    members = mesh.of_role(membership_pb2.ROLE_GENERATOR)
    published = next((member.serving for member in mesh.of_role(membership_pb2.ROLE_LEARNER)), None)
    found = [(member, generator_state(member, published, allowed_lag)) for member in members]
    return {
        **_counted(found),
        "tokens_per_s": sum(member.gauges.get("tokens_per_second", 0.0) for member in members),
        "members": [_generator(member, state) for member, state in _shown(found)],
    }


def _generator(member: membership_pb2.Member, state: str) -> dict[str, Any]:
    policy = member.serving
    return {
        **_member(member, state),
        "version": str(PolicyVersion.from_proto(policy)) if policy.incarnation else None,
        "tokens_per_s": member.gauges.get("tokens_per_second"),
        "responses": member.gauges.get("active_sequences"),
    }


def generator_state(
    member: membership_pb2.Member, published: trajectory_pb2.PolicyVersion | None, allowed_lag: int
) -> str:
    """One of `STATES`.

    Args:
        member: the generator.
        published: newest version by the learner's heartbeat; None without a learner.
        allowed_lag: versions by which it may be older.
    """
    state = member_state(member)
    if state in ("silent", "asleep"):
        return state
    if not member.serving.incarnation:
        return "starts"
    if published is not None and published.incarnation:
        other = member.serving.incarnation != published.incarnation
        if other or published.version - member.serving.version > allowed_lag:
            return "outdated"
    return state


def _rewards(mesh: LiveMesh) -> dict[str, Any]:
    found = [(member, member_state(member)) for member in mesh.of_role(membership_pb2.ROLE_REWARD)]
    return {**_counted(found), "members": [_member(member, state) for member, state in _shown(found)]}


def _plain(mesh: LiveMesh, role: membership_pb2.Role) -> list[dict[str, Any]]:
    found = [(member, member_state(member)) for member in mesh.of_role(role)]
    return [_member(member, state) for member, state in _shown(found)]


def _learner(mesh: LiveMesh) -> dict[str, Any] | None:
    members = mesh.of_role(membership_pb2.ROLE_LEARNER)
    if not members:
        return None
    member = members[0]
    return {
        **_member(member, member_state(member)),
        "phase": mesh.phase,
        "steps": member.gauges.get("steps"),
        "tokens_per_s": member.gauges.get("tokens_per_second"),
    }


def _buffer(table: buffer_pb2.DescribeResponse) -> dict[str, Any]:
    counts = table.counts
    return {
        "pending": counts.pending,
        "generating": counts.generating,
        "ready": counts.ready,
        "leased": counts.leased,
        "consumed": counts.consumed,
        "oldest_ready": format_ms(table.oldest_ready_ms) if table.oldest_ready_ms else "",
        "bound": table.max_staleness,
        "groups_per_step": table.groups_per_step,
        "bytes": format_bytes(table.bytes),
        "redis": format_bytes(table.redis_used_bytes),
        "learner_waited": format_ms(table.waiting_for_inserts_ms),
        "generators_waited": format_ms(table.waiting_for_samples_ms),
        "lines": [{"name": name, "text": text} for name, text in table_lines(table)],
    }


def _member(member: membership_pb2.Member, state: str) -> dict[str, Any]:
    return {
        "id": member.member_id,
        "state": state,
        "address": member.address,
        "waits": member.waiting_reason,
        "heartbeat_s": round(member.heartbeat_age_ms / 1000, 1),
        "memory": format_bytes(member.gauges["rss_bytes"]) if "rss_bytes" in member.gauges else "",
    }


def _counted(found: Sequence[tuple[membership_pb2.Member, str]]) -> dict[str, Any]:
    """Counts by state, and each member as the index of its state, in the order of their ids."""
    counts = Counter(state for _, state in found)
    return {
        "count": len(found),
        "states": [{"state": state, "count": counts[state]} for state in STATES if counts[state]],
        "cells": [STATES.index(state) for _, state in found],
    }


def _shown(found: Sequence[tuple[membership_pb2.Member, str]]) -> Sequence[tuple[membership_pb2.Member, str]]:
    """All, or of many those in the worst states."""
    if len(found) <= _MOST_CARDS:
        return found
    return sorted(found, key=lambda pair: -STATES.index(pair[1]))[:_MOST_CARDS]
