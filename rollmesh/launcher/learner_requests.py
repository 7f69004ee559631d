"""Requests to a running learner; every one has a deadline."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import UnreachableError
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.errors import to_rollmesh_error
from rollmesh.protos import learner_pb2, learner_pb2_grpc, membership_pb2

_STOP_S = 30.0


def learner_address(members: Iterable[membership_pb2.Member]) -> str:
    """Address of the learner among the members.

    Raises:
        UnreachableError: there is none.
    """
    addresses = (member.address for member in members if member.role == membership_pb2.ROLE_LEARNER)
    if address := next(filter(None, addresses), ""):
        return address
    raise UnreachableError("there is no learner")


async def ask_learner(address: str, security: SecuritySection, verb: str, request: Any, timeout_s: float) -> Any:
    """The answer to a call of the service `LearnerControl`.

    Raises:
        RollmeshError: the learner refuses, or does not answer in time.
    """
    try:
        async with open_channel(address, security) as channel:
            return await getattr(learner_pb2_grpc.LearnerControlStub(channel), verb)(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise to_rollmesh_error(error, f"learner {address}") from error


async def request_checkpoint(address: str, security: SecuritySection, timeout_s: float) -> Path:
    """Has the learner write a checkpoint; returns its folder once it is committed.

    Raises:
        RollmeshError: it could not be written, or not in time. The request stands after that.
    """
    answer = await ask_learner(address, security, "Checkpoint", learner_pb2.CheckpointRequest(), timeout_s)
    return Path(answer.path)


async def stop_learner(address: str, security: SecuritySection) -> None:
    """Has the learner end the run after the present step, with a checkpoint; returns at once.

    Raises:
        RollmeshError: it does not answer.
    """
    await ask_learner(address, security, "Stop", learner_pb2.StopRequest(), _STOP_S)
