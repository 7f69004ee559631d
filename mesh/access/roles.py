"""Roles in the mesh, and the ids of its members.

A member id says its role and the name of its grant: `ROLE-anything`, with a name `ROLE-NAME.anything`. A grant is good
for ids of its own role and name alone. So no other role can take a member's id, while it lives or afterwards. Nothing
has to be remembered for it: a process that starts again and a grant that is renewed are still the same.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """The role of a caller in the mesh."""

    LEARNER = "learner"
    GENERATOR = "generator"
    REWARD = "reward"
    BUFFER = "buffer"
    # Computes one model of the algorithm for the learner: a critic, a reference policy.
    MODEL = "model"
    # Runs the mesh: may read everything, drain and stop.
    OPERATOR = "operator"
    # Only reads: dashboards, colleagues.
    OBSERVER = "observer"


@dataclass(frozen=True)
class Identity:
    """The identity of a caller: its role and its member id (empty: of no member)."""

    role: Role
    member_id: str = ""


def id_prefix(role: Role, name: str) -> str:
    """The beginning of the ids that a grant of this role and name covers."""
    return f"{role}-{name}." if name else f"{role}-"


def parse_member_id(member_id: str) -> tuple[str, str]:
    """The role and the grant's name that a member id says."""
    role, _, rest = member_id.partition("-")
    name, dot, _ = rest.partition(".")
    return role, name if dot else ""


def new_identity(role: Role, name: str = "") -> Identity:
    """A role under a member id that is unique per process."""
    return Identity(role, f"{id_prefix(role, name)}{uuid.uuid4().hex[:12]}")
