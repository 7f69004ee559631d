"""Turns as operators see them and ask for them, over the contracts."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from rich.console import Console

from rollmesh.cli.observe.turns import _ask_to_resume, _ask_to_yield
from rollmesh.cli.options import Target
from rollmesh.launcher.console.tables import status_table
from rollmesh.launcher.final_work import learner_work
from rollmesh.launcher.mesh_client import MeshClient, Snapshot
from rollmesh.launcher.placement.turns import read_turns, turns_text
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.coordinator.control_service import LearnerControlService
from rollmesh.learner.placement.turn_requests import TurnRequests
from rollmesh.learner.status import LearnerStatus, PlacementView
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError, UnreachableError
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.protos import (
    buffer_pb2,
    buffer_pb2_grpc,
    generator_pb2,
    generator_pb2_grpc,
    learner_pb2,
    learner_pb2_grpc,
    membership_pb2,
    membership_pb2_grpc,
)

OPEN = SecuritySection()


class Front(membership_pb2_grpc.MembershipServicer, buffer_pb2_grpc.BufferServicer):
    """Lists the members of a small mesh."""

    def __init__(self) -> None:
        self.members: list[membership_pb2.Member] = []

    async def List(self, request: Any, context: Any) -> membership_pb2.ListResponse:
        return membership_pb2.ListResponse(members=self.members)

    async def Describe(self, request: Any, context: Any) -> buffer_pb2.DescribeResponse:
        return buffer_pb2.DescribeResponse()


class Sleeper(generator_pb2_grpc.GeneratorControlServicer):
    """A generator without weights."""

    async def Status(self, request: Any, context: Any) -> generator_pb2.GeneratorStatusResponse:
        level = generator_pb2.SLEEP_LEVEL_WITHOUT_WEIGHTS
        return generator_pb2.GeneratorStatusResponse(shares_devices=True, sleeping=level)


@dataclass
class Mesh:
    """One server that is all services."""

    address: str
    front: Front
    status: LearnerStatus = field(default_factory=LearnerStatus)
    requests: TurnRequests = field(default_factory=TurnRequests)

    @property
    def target(self) -> Target:
        return Target(self.address, OPEN)

    async def shown(self) -> list[str]:
        console = Console(width=200)
        async with MeshClient(self.address, OPEN) as client:
            snapshot = await client.read_snapshot()
            await client.read_sleep(snapshot)
        with console.capture() as capture:
            console.print(status_table(snapshot))
        return [" ".join(line.split()) for line in capture.get().splitlines()]


@pytest.fixture(params=[True])
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    server, front = new_server(OPEN), Front()
    port = bind(server, "127.0.0.1", 0, OPEN)
    found = Mesh(f"127.0.0.1:{port}", front)
    membership_pb2_grpc.add_MembershipServicer_to_server(front, server)
    buffer_pb2_grpc.add_BufferServicer_to_server(front, server)
    generator_pb2_grpc.add_GeneratorControlServicer_to_server(Sleeper(), server)
    turns = found.requests if request.param else None
    learner_pb2_grpc.add_LearnerControlServicer_to_server(
        LearnerControlService(found.status, ControlRequests(), turns), server
    )
    await server.start()
    learner, generator = membership_pb2.ROLE_LEARNER, membership_pb2.ROLE_GENERATOR
    sharing = {"shares_devices": 1.0}
    front.members = [
        membership_pb2.Member(member_id="learner", role=learner, address=found.address),
        membership_pb2.Member(member_id="g-shared", role=generator, address=found.address, gauges=sharing),
        membership_pb2.Member(member_id="g-gone", role=generator, address="127.0.0.1:9", gauges=sharing),
        membership_pb2.Member(member_id="g-own", role=generator, address=found.address),
    ]
    yield found
    await server.stop(0)


async def test_status_shows_the_phase_its_reason_and_who_sleeps(mesh: Mesh) -> None:
    mesh.status.placement = PlacementView("hybrid", "releasing", time.monotonic() - 12, 4, 1)
    mesh.status.waiting_reason = "waits for g-shared to give their memory back (12 s)"
    shown = await mesh.shown()
    reason = re.escape("turn 4, 1 taken back; waits for g-shared to give their memory back (12 s)")
    assert [row for row in shown if re.fullmatch(rf"turn releasing for \d+ s, {reason}", row)]
    assert "sleep does not answer: g-gone; asleep, without weights: g-shared" in shown


async def test_a_learner_that_is_asked_to_end_amid_a_swap_is_waited_for(mesh: Mesh) -> None:
    mesh.status.phase = "swapping"
    assert await learner_work(mesh.address, OPEN) == "swapping"
    mesh.status.phase = "waiting_for_groups"
    assert not await learner_work(mesh.address, OPEN)


async def test_a_view_that_looks_on_from_the_start_shows_turns_once_the_learner_has_them(mesh: Mesh) -> None:
    sharing = mesh.front.members
    async with MeshClient(mesh.address, OPEN) as client:
        assert (await client.read_snapshot()).turns is None, "it loads its models"
        mesh.status.placement = PlacementView("collocated", "training", 0.0, 1, 0)
        found = await client.read_snapshot()
        assert found.turns is not None
        console = Console(width=200)
        with console.capture() as capture:
            console.print(status_table(found))
        assert ", turn 1 " in capture.get()
        mesh.front.members = sharing[:1]
        assert (await client.read_snapshot()).turns is not None, "all generators are gone for now"


async def test_a_learner_that_shares_with_no_generator_is_not_asked(mesh: Mesh) -> None:
    learner, *_, own = mesh.front.members
    mesh.front.members = [learner, own]
    mesh.status.placement = PlacementView("hybrid", "training", 0.0, 1, 0)
    assert not any(line.startswith(("turn ", "sleep ")) for line in await mesh.shown())


@pytest.mark.parametrize(
    ("phase", "awaited"), [("releasing", True), ("onloading", False), ("training", True), ("generating", True)]
)
def test_a_step_of_the_learners_own_awaits_nobody(phase: str, awaited: bool) -> None:
    """The wait of the step before is over."""
    reason = "waits for generator-0-1f to give their memory back (12 s)"
    turns = learner_pb2.PlacementStatus(mode="collocated", phase=phase, turns=3, reason=reason)
    learner = membership_pb2.Member(member_id="learner", role=membership_pb2.ROLE_LEARNER, waiting_reason=reason)
    snapshot = Snapshot(table=buffer_pb2.DescribeResponse(), members=[learner], turns=turns)
    assert (reason in turns_text(turns)) == awaited
    assert (reason in snapshot.who_waits()) == awaited


def test_the_newest_reason_of_the_learner_counts_before_what_generators_say() -> None:
    reason = "the evaluation of the present version ends first"
    turns = learner_pb2.PlacementStatus(mode="collocated", phase="generating", turns=1, reason=reason)
    learner = membership_pb2.Member(member_id="learner", role=membership_pb2.ROLE_LEARNER)
    says = buffer_pb2.DescribeResponse(learner_waits="waits for groups: 0 begun; a generator says: loads the model")
    assert Snapshot(table=says, members=[learner], turns=turns).who_waits() == f"learner: {reason}"


def test_generators_that_have_no_weights_yet_start() -> None:
    turns = learner_pb2.PlacementStatus(mode="collocated", phase="generating", phase_ms=18_000, turns=1)
    generator = membership_pb2.Member(member_id="g", role=membership_pb2.ROLE_GENERATOR)
    snapshot = Snapshot(members=[generator], turns=turns)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(status_table(snapshot))
    assert "generators start, for 18 s, turn 1" in capture.get()
    generator.serving.incarnation = 1
    assert not snapshot.generators_start


async def test_yield_waits_for_the_generators_and_resume_ends_the_time(mesh: Mesh) -> None:
    asked = asyncio.create_task(_ask_to_yield(mesh.target, hold_s=50, timeout_s=30))
    async with asyncio.timeout(120):
        while not mesh.requests.held_s:
            await asyncio.sleep(0.01)
        assert 0 < mesh.requests.held_s <= 50
        mesh.status.placement = PlacementView("collocated", "generating", 0.0, 1, 0)
        turns = await read_turns(mesh.address, OPEN)
        assert turns is not None
        assert 0 < turns.held_ms <= 50_000
        assert not asked.done()
        mesh.requests.answer()
        await asked
        await _ask_to_resume(mesh.target)
    assert mesh.requests.held_s == 0


async def test_a_yield_that_is_not_answered_in_time_stands(mesh: Mesh) -> None:
    with pytest.raises(UnreachableError) as late:
        await _ask_to_yield(mesh.target, hold_s=50, timeout_s=0.3)
    assert "it stands" in late.value.hint
    assert mesh.requests.held_s > 0
    mesh.front.members = []
    with pytest.raises(UnreachableError, match="there is no learner"):
        await _ask_to_resume(mesh.target)


@pytest.mark.parametrize("mesh", [False], indirect=True)
async def test_a_learner_that_shares_nothing_says_so(mesh: Mesh) -> None:
    with pytest.raises(ConfigError, match=r"has its devices for itself.*there is nothing to yield"):
        await _ask_to_yield(mesh.target, hold_s=1, timeout_s=5)
