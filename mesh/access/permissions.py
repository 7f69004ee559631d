"""The table of all verbs, with the roles that may call each.

Invariants: every verb of the contracts stands here (a test reads the protos), and any other is refused. A request that
names a member (`member_id`) may come from that member alone, whatever its role. A member's id says its role
(`mesh.access.roles`), and no claim of another role is good for it. So state under an id belongs to one role.
Statements that only a learner may make of itself are accepted from learners alone.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import Any

from google.protobuf import descriptor_pool

from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.errors import PermissionDeniedError
from rollmesh.protos import membership_pb2

_LOOKERS = frozenset({Role.OPERATOR, Role.OBSERVER})
_MEMBERS = frozenset({Role.LEARNER, Role.GENERATOR, Role.REWARD, Role.MODEL})
_LEARNER, _GENERATOR, _OPERATOR = frozenset({Role.LEARNER}), frozenset({Role.GENERATOR}), frozenset({Role.OPERATOR})
ALL = frozenset(Role)

VERBS = MappingProxyType(
    {
        "/rollmesh.v1.Membership/Join": _MEMBERS,
        "/rollmesh.v1.Membership/Heartbeat": _MEMBERS,
        "/rollmesh.v1.Membership/Leave": _MEMBERS,
        "/rollmesh.v1.Membership/List": ALL,
        "/rollmesh.v1.Buffer/Seed": _LEARNER,
        "/rollmesh.v1.Buffer/Admit": _GENERATOR,
        "/rollmesh.v1.Buffer/Write": _GENERATOR,
        "/rollmesh.v1.Buffer/Upload": _GENERATOR,
        "/rollmesh.v1.Buffer/Sample": _LEARNER,
        "/rollmesh.v1.Buffer/Fetch": _LEARNER,
        "/rollmesh.v1.Buffer/Claim": _LEARNER,
        "/rollmesh.v1.Buffer/Commit": _LEARNER,
        "/rollmesh.v1.Buffer/Resume": _LEARNER,
        "/rollmesh.v1.Buffer/Nack": _LEARNER,
        "/rollmesh.v1.Buffer/Release": _LEARNER | _GENERATOR,
        "/rollmesh.v1.Buffer/SetPriorities": _LEARNER,
        "/rollmesh.v1.Buffer/Reassert": _LEARNER,
        "/rollmesh.v1.Buffer/Redrive": _OPERATOR,
        "/rollmesh.v1.Buffer/SetPolicyVersion": _LEARNER,
        "/rollmesh.v1.Buffer/Describe": _LEARNER | _LOOKERS,
        "/rollmesh.v1.Buffer/Holders": _LEARNER | _LOOKERS,
        "/rollmesh.v1.Buffer/Ledger": _LEARNER | _LOOKERS,
        "/rollmesh.v1.Diagnosis/Examine": _OPERATOR,
        "/rollmesh.v1.GeneratorControl/Status": _LOOKERS,
        "/rollmesh.v1.GeneratorControl/Drain": _OPERATOR,
        "/rollmesh.v1.GeneratorControl/Generate": _OPERATOR,
        "/rollmesh.v1.GeneratorControl/Probe": _OPERATOR,
        "/rollmesh.v1.GeneratorControl/Sleep": _LEARNER,
        "/rollmesh.v1.GeneratorControl/Wake": _LEARNER,
        "/rollmesh.v1.LearnerControl/Status": _LOOKERS,
        "/rollmesh.v1.LearnerControl/Checkpoint": _OPERATOR,
        "/rollmesh.v1.LearnerControl/Stop": _OPERATOR,
        "/rollmesh.v1.LearnerControl/Yield": _OPERATOR,
        "/rollmesh.v1.LearnerControl/Resume": _OPERATOR,
        "/rollmesh.v1.Reward/Score": _GENERATOR | _OPERATOR,
        "/rollmesh.v1.Reward/ScoreStream": _GENERATOR | _OPERATOR,
        "/rollmesh.v1.Reward/Info": _GENERATOR | _LOOKERS,
        "/rollmesh.v1.RoleModel/Describe": _LEARNER | _LOOKERS,
        "/rollmesh.v1.RoleModel/Attach": _LEARNER,
        "/rollmesh.v1.RoleModel/Put": _LEARNER,
        "/rollmesh.v1.RoleModel/Infer": _LEARNER,
        "/rollmesh.v1.RoleModel/Accumulate": _LEARNER,
        "/rollmesh.v1.RoleModel/Apply": _LEARNER,
        "/rollmesh.v1.RoleModel/Discard": _LEARNER,
        "/rollmesh.v1.RoleModel/BeginCheckpoint": _LEARNER,
        "/rollmesh.v1.RoleModel/AwaitCheckpoint": _LEARNER,
        "/rollmesh.v1.Weights/GetModelBundle": _GENERATOR | _OPERATOR,
        "/rollmesh.v1.Weights/Watch": _GENERATOR | _OPERATOR,
        "/rollmesh.v1.Weights/FetchBucket": _GENERATOR | _OPERATOR,
        "/rollmesh.v1.Weights/Route": _GENERATOR,
        "/rollmesh.v1.Weights/JoinBroadcast": _GENERATOR,
        "/rollmesh.v1.Weights/Report": _GENERATOR,
        "/rollmesh.v1.Weights/Pushes": _LOOKERS,
    }
)
# Everyone may ask for health: load balancers and supervisors have no credential. A stream of it is for every role, and
# so is reflection.
HEALTH = "/grpc.health.v1.Health/"
HEALTH_CHECK = f"{HEALTH}Check"
_REFLECTION = "/grpc.reflection."


def contract_of(method: str) -> str:
    """The full name of the gRPC service of a method such as `/rollmesh.v1.Buffer/Claim`."""
    return method.split("/")[1]


def check_role(caller: Identity, method: str) -> None:
    """Refuses a verb that is not its caller's.

    Raises:
        PermissionDeniedError: the table does not name the caller's role.
    """
    allowed = VERBS.get(method, ALL if method.startswith((HEALTH, _REFLECTION)) else frozenset[Role]())
    if caller.role not in allowed:
        may = f"{', '.join(sorted(allowed))} may: rollmesh token grant ROLE makes a token file" if allowed else ""
        raise PermissionDeniedError(f"{caller.role} may not call {method}", hint=may)


_JOIN = "/rollmesh.v1.Membership/Join"
# Fields that a learner alone may set, in verbs that others may call too.
_LEARNERS_WORDS = MappingProxyType(
    {
        "/rollmesh.v1.Membership/Heartbeat": "incarnation",
        "/rollmesh.v1.Membership/Leave": "run_finished",
    }
)
_ROLES = {
    Role.LEARNER: membership_pb2.ROLE_LEARNER,
    Role.GENERATOR: membership_pb2.ROLE_GENERATOR,
    Role.REWARD: membership_pb2.ROLE_REWARD,
    Role.MODEL: membership_pb2.ROLE_MODEL,
}


@cache
def names_member(method: str) -> bool:
    """True if requests of a verb name the member that they come from."""
    service, _, name = method.removeprefix("/").partition("/")
    try:
        found = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
    except KeyError:
        return False
    return "member_id" in found.input_type.fields_by_name


def check_member(caller: Identity, method: str, request: Any, *, taken_apart: bool = False) -> None:
    """Refuses a request in another member's name or role, or with a word that is not its role's.

    Args:
        method: a verb for which `names_member` holds.
        taken_apart: the request is in `request.message`.

    Raises:
        PermissionDeniedError: the credential is of another member or role, or of none.
    """
    if taken_apart:
        request = request.message
    if method == _JOIN and request.role != _ROLES[caller.role]:
        raise PermissionDeniedError(f"a {caller.role} may not join as {membership_pb2.Role.Name(request.role)}")
    word = _LEARNERS_WORDS.get(method)
    if word is not None and caller.role is not Role.LEARNER and getattr(request, word):
        raise PermissionDeniedError(f"a {caller.role} may not say {word}: that is the learner's")
    if request.member_id and request.member_id != caller.member_id:
        raise PermissionDeniedError(
            f"the credential is {caller.member_id or 'no member'!r}'s, the request {request.member_id!r}'s"
        )
