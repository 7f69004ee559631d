"""Every verb of the contracts, as the protos say, and intruders that try it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import message_factory

from rollmesh.mesh.access.credentials import Credentials
from rollmesh.mesh.access.permissions import VERBS, contract_of, names_member
from rollmesh.mesh.access.role_grants import MeshKey
from rollmesh.mesh.access.roles import Role
from rollmesh.mesh.rpc.errors import is_transient
from rollmesh.protos import (
    buffer_pb2,
    diagnosis_pb2,
    generator_pb2,
    learner_pb2,
    membership_pb2,
    reward_pb2,
    role_pb2,
    weights_pb2,
)

FILES = (buffer_pb2, diagnosis_pb2, generator_pb2, learner_pb2, membership_pb2, reward_pb2, role_pb2, weights_pb2)
_DEADLINE_S = 240.0
# More than a claim lasts, and what clocks may differ by.
LONG_AGO_S = 3600.0
# Claims that no other role may make of itself.
LEARNERS_WORDS = {"incarnation": 1, "run_finished": True}


@dataclass(frozen=True)
class Verb:
    """A method, and how it is called."""

    path: str
    request: type[Any]
    response: type[Any]
    streams_in: bool
    streams_out: bool

    def asked_by(self, member_id: str = "", role: Role | None = None) -> Any:
        """A request that names a member where the verb has a place for it."""
        request = self.request()
        if names_member(self.path):
            request.member_id = member_id
        if self.path.endswith("/Join") and role is not None:
            request.role = membership_pb2.Role.Value(f"ROLE_{role.name}")
        return request

    async def call(self, channel: grpc.aio.Channel, claim: str | None, request: Any) -> grpc.StatusCode:
        """The status with which a call ends; of streams the first answer counts."""
        metadata = [("authorization", f"Bearer {claim}")] if claim is not None else []
        kind = f"{'stream' if self.streams_in else 'unary'}_{'stream' if self.streams_out else 'unary'}"
        method = getattr(channel, kind)(
            self.path, request_serializer=self.request.SerializeToString, response_deserializer=self.response.FromString
        )
        call = method(_one(request) if self.streams_in else request, timeout=_DEADLINE_S, metadata=tuple(metadata))
        try:
            if self.streams_out:
                await call.read()
                call.cancel()
            else:
                await call
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL and is_transient(error):
                # A message written while the service ends the stream hides the status that it ended with.
                return await self.call(channel, claim, request)
            return error.code()
        return grpc.StatusCode.OK


async def _one(request: Any) -> AsyncIterator[Any]:
    yield request


def all_verbs() -> list[Verb]:
    """Those of every gRPC service that a proto file describes."""
    return [
        Verb(
            f"/{service.full_name}/{method.name}",
            message_factory.GetMessageClass(method.input_type),
            message_factory.GetMessageClass(method.output_type),
            method.client_streaming,
            method.server_streaming,
        )
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


@dataclass(frozen=True)
class Attempt:
    """One intruder at one verb."""

    what: str
    verb: Verb
    # None: no credential at all.
    claim: str | None
    request: Any
    refused_as: grpc.StatusCode


def attempts(token: str) -> list[Attempt]:
    """Everyone who must not get in, at each verb.

    Args:
        token: of the mesh that is attacked; its owner alone can make some of these.
    """
    return [attempt for verb in all_verbs() for attempt in _at(verb, token)]


def _at(verb: Verb, token: str) -> list[Attempt]:
    contract, allowed = contract_of(verb.path), VERBS[verb.path]
    role = sorted(allowed)[0]
    mesh = MeshKey(token)
    unknown, denied = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
    me, good = f"{role}-intruder", _credentials(mesh, role).claim(contract)
    *signed, signature = good.split(".")
    strangers = {
        "no credential": None,
        "an empty one": "",
        "garbage": "let me in",
        "the token itself": token,
        "another mesh": _credentials(MeshKey("a token of another mesh altogether"), role).claim(contract),
        "another contract": _credentials(mesh, role).claim("rollmesh.v1.Other"),
        "a changed signature": ".".join([*signed, signature[::-1]]),
        "a claim that is over": _credentials(mesh, role, clock=lambda: time.time() - LONG_AGO_S).claim(contract),
        "a grant that is over": _credentials(mesh, role, until=time.time() - LONG_AGO_S).claim(contract),
        "a name outside its grant": _credentials(mesh, role, name="node1").claim(contract),
    }
    found = [Attempt(what, verb, claim, verb.asked_by(), unknown) for what, claim in strangers.items()]
    for wrong in set(Role) - allowed:
        claim = _credentials(mesh, wrong).claim(contract)
        found.append(Attempt(f"role {wrong}", verb, claim, verb.asked_by(f"{wrong}-intruder", role), denied))
    if names_member(verb.path):
        found.append(Attempt("a foreign member id", verb, good, verb.asked_by(f"{role}-victim", role), denied))
        # Those of grants with a name, too.
        for victim in (f"{role}-node1.victim", *(f"{other}-victim" for other in Role if other is not role), "victim"):
            claim = _credentials(mesh, role, member_id=victim).claim(contract)
            found.append(Attempt(f"the claim of {victim}", verb, claim, verb.asked_by(victim, role), unknown))
    if verb.path.endswith("/Join"):
        wrong_role = next(other for other in sorted(allowed) if other is not role)
        found.append(Attempt("a foreign role", verb, good, verb.asked_by(me, wrong_role), denied))
    for field, value in LEARNERS_WORDS.items():
        if role is not Role.LEARNER and field in verb.request.DESCRIPTOR.fields_by_name:
            request = verb.asked_by(me, role)
            setattr(request, field, value)
            found.append(Attempt(f"a learner's {field}", verb, good, request, denied))
    return found


def _credentials(
    mesh: MeshKey,
    role: Role,
    *,
    name: str = "",
    member_id: str = "",
    until: float = 0.0,
    clock: Callable[[], float] = time.time,
) -> Credentials:
    grant, key = mesh.grant(role, name, until)
    return Credentials(mesh.public, grant, key, member_id or f"{role}-intruder", clock)
