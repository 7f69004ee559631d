"""Sessions of a role: calls that come twice, late, or from a learner that was superseded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

from rollmesh.learner.engines.interface import StepResult
from rollmesh.learner.role_service import servicer
from rollmesh.learner.role_service.servicer import RoleServicer
from rollmesh.mesh.errors import DataError, FencedError, RoleLostError
from rollmesh.protos import role_pb2


class Ranks:
    """Remembers its orders; outcomes come at once unless `outcome` is set."""

    def __init__(self) -> None:
        self.orders: list[str] = []
        self.outcome: Future[Any] | None = None
        self.written: Future[None] = Future()

    def submit(self, order: str, **_arguments: Any) -> Future[Any]:
        self.orders.append(order)
        if self.outcome is not None:
            return self.outcome
        done: Future[Any] = Future()
        done.set_result(StepResult({"loss": 2.0}, skipped=False))
        return done


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def role(ranks: Ranks) -> RoleServicer:
    return RoleServicer(role_pb2.DescribeRoleResponse(role="critic"), ranks, most_bytes=100)


def call(number: int = 0, session: str = "a", incarnation: int = 1) -> role_pb2.RoleCall:
    return role_pb2.RoleCall(session=session, incarnation=incarnation, number=number)


async def answers(stream: AsyncIterator[role_pb2.RoleAnswer]) -> list[role_pb2.RoleAnswer]:
    return [answer async for answer in stream]


def run(*streams: AsyncIterator[role_pb2.RoleAnswer]) -> list[list[role_pb2.RoleAnswer]]:
    """The answers of calls, one after another."""

    async def all_of_them() -> list[list[role_pb2.RoleAnswer]]:
        return [await answers(stream) for stream in streams]

    work: Coroutine[Any, Any, list[list[role_pb2.RoleAnswer]]] = all_of_them()
    return asyncio.run(work)


def attach(role: RoleServicer, session: str = "a", incarnation: int = 1) -> AsyncIterator[role_pb2.RoleAnswer]:
    return role.Attach(role_pb2.AttachRoleRequest(session=session, incarnation=incarnation), None)


def apply(role: RoleServicer, *place: Any) -> AsyncIterator[role_pb2.RoleAnswer]:
    return role.Apply(role_pb2.ApplyRoleRequest(call=call(*place)), None)


def test_a_call_that_comes_again_is_answered_again_and_done_once(role: RoleServicer, ranks: Ranks) -> None:
    _, _, first, again = run(attach(role), attach(role), apply(role, 1), apply(role, 1))
    assert first == again
    assert dict(first[0].step.metrics) == {"loss": 2.0}
    assert ranks.orders == ["attach", "apply"]


def test_a_new_session_ends_the_one_before(role: RoleServicer, ranks: Ranks) -> None:
    run(attach(role), apply(role, 1), attach(role, "b", 2), apply(role, 1, "b", 2))
    with pytest.raises(FencedError):
        run(apply(role, 2, "a", 1))
    with pytest.raises(FencedError):
        run(attach(role, "c", 1))
    with pytest.raises(RoleLostError, match="does not know the session"):
        run(apply(role, 1, "c", 2))
    assert ranks.orders == ["attach", "apply", "attach", "apply"]


def test_long_work_says_that_it_continues(role: RoleServicer, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "WORKING_S", 0.01)
    run(attach(role))
    ranks.outcome = Future()

    async def follow() -> list[role_pb2.RoleAnswer]:
        found = []
        async for answer in apply(role, 1):
            found.append(answer)
            if len(found) == 3:
                assert ranks.outcome is not None
                ranks.outcome.set_result(StepResult({}, skipped=True))
        return found

    *words, last = asyncio.run(follow())
    assert len(words) >= 3
    assert all(answer.HasField("working") for answer in words)
    assert last.step.skipped


def test_a_disk_that_refuses_a_checkpoint_is_a_failure_of_the_checkpoint(role: RoleServicer, ranks: Ranks) -> None:
    run(attach(role))
    ranks.written.set_exception(OSError("No space left on device"))
    with pytest.raises(DataError, match="role critic cannot write its part of a checkpoint: No space left"):
        run(role.AwaitCheckpoint(role_pb2.AwaitRoleCheckpointRequest(call=call()), None))
