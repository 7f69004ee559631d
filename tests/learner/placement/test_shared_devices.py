"""Turns on shared devices: real calls to generators that follow a script, and ranks that write down their orders."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.distributed.rank_group import RankGroup
from rollmesh.learner.distributed.trajectories import InlineTrajectories
from rollmesh.learner.placement import generator_group
from rollmesh.learner.placement.generator_group import GeneratorGroup
from rollmesh.learner.placement.shared_devices import SharedDevices
from rollmesh.learner.placement.swap import Phase, SwapMachine, SwapRules
from rollmesh.learner.placement.swap_steps import SwapSteps
from rollmesh.learner.placement.turn_log import FILE, TurnLog
from rollmesh.learner.placement.turn_requests import TurnRequests
from rollmesh.learner.placement.turn_rules import TableView, TurnRules
from rollmesh.learner.runtime import LearnerRuntime
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import FencedError, SwapError, UnreachableError, WeightsError
from rollmesh.mesh.membership import ASLEEP, SHARES_DEVICES, MembershipAgent
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import generator_pb2, generator_pb2_grpc, membership_pb2

_S = 120.0
INSECURE = SecuritySection(allow_insecure=True)
SLEEPING = ["sleep FROZEN", "sleep WITHOUT_WEIGHTS"]
WAKING = ["wake MEMORY", "wake WEIGHTS", "wake VERIFIED", "wake GENERATING"]


class ScriptedGenerator(generator_pb2_grpc.GeneratorControlServicer):
    """Answers as a script says; its calls are kept."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refusals: dict[str, list[Exception]] = {}
        self.lost_replies: set[str] = set()
        self.hangs_at = ""

    async def Sleep(self, request: generator_pb2.SleepRequest, context: Any) -> generator_pb2.SleepResponse:
        level = generator_pb2.SleepLevel.Name(request.level).removeprefix("SLEEP_LEVEL_")
        await self._play(f"sleep {level}", context)
        return generator_pb2.SleepResponse(freed_bytes=100)

    async def Wake(self, request: generator_pb2.WakeRequest, context: Any) -> generator_pb2.WakeResponse:
        step = generator_pb2.WakeStep.Name(request.step).removeprefix("WAKE_STEP_")
        await self._play(f"wake {step}", context)
        assert request.incarnation == 3
        assert (list(request.probe_ids), list(request.probe_log_probs)) == ([1, 2, 3], [-0.5, -0.5])
        assert PolicyVersion.from_proto(request.policy) == PolicyVersion(3, 7)
        return generator_pb2.WakeResponse()

    async def _play(self, call: str, context: Any) -> None:
        self.calls.append(call)
        if self.hangs_at == call:
            await asyncio.Event().wait()
        if call in self.lost_replies:
            self.lost_replies.discard(call)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
        if self.refusals.get(call):
            raise self.refusals[call].pop(0)


@dataclass
class Ranks:
    """Ranks that write their orders down."""

    orders: list[str] = field(default_factory=list)
    no_memory: int = 0
    full_disk: bool = False
    keep_alive_s: float = 0.5

    @property
    def moves(self) -> list[str]:
        """The orders without those to wait, whose number is that of a busy machine."""
        return [order for order in self.orders if order != "wait"]

    def onload(self) -> None:
        self.orders.append("onload")
        if self.no_memory:
            self.no_memory -= 1
            raise MemoryError("out of memory")

    def offload(self) -> Any:
        self.orders.append("offload")
        if self.full_disk:
            raise SwapError("disk full")

        class Moved:
            freed_bytes = 1000

        return Moved()

    def log_probs(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return np.full(len(token_ids) - 1, -0.5, dtype=np.float32)

    def keep_alive(self) -> None:
        self.orders.append("wait")


@dataclass
class Versions:
    """Versions that are in force."""

    failure: Exception | None = None

    def wait_in_force(self) -> None:
        if self.failure is not None:
            raise self.failure


@dataclass
class Directory:
    """The agent's part that knows the members."""

    present: dict[str, membership_pb2.Member]

    away: bool = False
    fenced: asyncio.Event = field(default_factory=asyncio.Event)

    async def heartbeat(self) -> None:
        if self.away:
            raise UnreachableError("the mesh does not answer")

    async def members(self, _role: object) -> list[membership_pb2.Member]:
        if self.away:
            raise UnreachableError("the mesh does not answer")
        return list(self.present.values())


class World:
    """A learner's turns with some generators."""

    def __init__(self, bridge: AsyncBridge, folder: Path, *, step_s: float = _S) -> None:
        self.bridge, self.folder = bridge, folder
        self.generators: dict[str, ScriptedGenerator] = {}
        self.members: dict[str, membership_pb2.Member] = {}
        self.servers: dict[str, grpc.aio.Server] = {}
        self.ranks, self.versions = Ranks(), Versions()
        self.status, self.controls = LearnerStatus(published=PolicyVersion(3, 7)), ControlRequests()
        self.requests = TurnRequests()
        self.table = TableView(generating=0, ready=0, leased=4)
        self.machine = SwapMachine(SwapRules(step_s, pause_s=0.1), time.monotonic)
        self.directory = Directory(self.members)
        self.group = GeneratorGroup(
            cast(MembershipAgent, self.directory),
            lambda address: open_channel(address, INSECURE),
            host="here",
            incarnation=3,
        )
        runtime = LearnerRuntime(bridge, cast(RankGroup, self.ranks), InlineTrajectories(), self.controls, self.status)
        self.turns = SharedDevices(
            runtime,
            SwapSteps(runtime, self.group, self.versions, self.machine, (1, 2, 3)),
            self.machine,
            TurnRules(batches=2, groups=4, last_version=100),
            self.requests,
            TurnLog(folder),
            "collocated",
            self.look,
        )

    async def look(self) -> TableView:
        return self.table

    def add(self, name: str, *, pid: int = 0, host: str = "elsewhere") -> ScriptedGenerator:
        generator = self.generators[name] = ScriptedGenerator()

        async def serve() -> int:
            server = new_server(INSECURE)
            generator_pb2_grpc.add_GeneratorControlServicer_to_server(generator, server)
            port = bind(server, "127.0.0.1", 0, INSECURE)
            await server.start()
            self.servers[name] = server
            return port

        port = self.bridge.call(serve(), _S)
        self.members[name] = membership_pb2.Member(
            joined_unix_ms=round(time.time() * 1000),
            member_id=name,
            address=f"127.0.0.1:{port}",
            host_id=host,
            pid=pid,
            gauges={SHARES_DEVICES: 1.0},
        )
        return generator

    def kill(self, name: str) -> None:
        """Ends a generator as kill -9 does: its server, and soon its membership."""
        self.bridge.call(self.servers.pop(name).stop(None), _S)
        del self.members[name]

    def generating(self) -> None:
        self.turns.give()
        for generator in self.generators.values():
            generator.calls.clear()
        self.ranks.orders.clear()

    def phases(self) -> list[str]:
        return [json.loads(line)["phase"] for line in (self.folder / FILE).read_text().splitlines()]

    def close(self) -> None:
        self.turns.close()
        for server in self.servers.values():
            self.bridge.call(server.stop(None), _S)


@pytest.fixture(scope="module")
def bridge() -> Iterator[AsyncBridge]:
    bridge = AsyncBridge()
    yield bridge
    bridge.close()


@pytest.fixture
def make(bridge: AsyncBridge, tmp_path: Path) -> Iterator[Callable[..., World]]:
    with contextlib.ExitStack() as closers:

        def build(**rules: float) -> World:
            world = World(bridge, tmp_path, **rules)
            closers.callback(world.close)
            return world

        yield build


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_turns_go_to_and_fro_step_by_step(make: Callable[..., World]) -> None:
    world = make()
    first, second = world.add("generator-0"), world.add("generator-1")
    world.turns.give()
    assert world.machine.phase is Phase.GENERATING
    assert first.calls[:4] == second.calls[:4] == WAKING
    world.generating()
    assert world.turns.take(7)
    assert first.calls == second.calls == SLEEPING
    assert world.ranks.moves == ["onload"]
    assert world.phases() == [
        *("training", "offloading", "waking", "loading", "verifying", "resuming", "generating"),
        *("freezing", "releasing", "onloading", "training"),
    ]
    metrics = world.turns.metrics()
    assert metrics["placement/generators_freed_bytes"] == 200.0
    assert metrics["placement/learner_freed_bytes"] == 1000.0
    assert metrics["placement/turns"] == 2.0
    world.turns.give()
    assert 0 < world.turns.metrics()["placement/swap_share"] < 1
    assert world.status.placement is not None
    assert world.status.placement.phase == "generating"


def test_replies_that_are_lost_are_asked_for_again(make: Callable[..., World]) -> None:
    world = make()
    generator = world.add("generator-0")
    generator.lost_replies = {"wake WEIGHTS", "sleep FROZEN"}
    world.turns.give()
    assert generator.calls[:5] == ["wake MEMORY", "wake WEIGHTS", "wake WEIGHTS", "wake VERIFIED", "wake GENERATING"]
    assert world.turns.take(7)
    assert generator.calls[-3:] == ["sleep FROZEN", *SLEEPING]


def test_a_generator_that_dies_amid_a_step_holds_up_no_one(make: Callable[..., World]) -> None:
    world = make()
    world.add("generator-0")
    dying = world.add("generator-1")
    world.turns.give()
    dying.hangs_at = "sleep WITHOUT_WEIGHTS"
    taken: Future[bool] = Future()
    threading.Thread(target=lambda: taken.set_result(world.turns.take(7))).start()
    until(lambda: "sleep WITHOUT_WEIGHTS" in dying.calls)
    world.kill("generator-1")
    assert taken.result(_S)
    assert world.machine.phase is Phase.TRAINING


def test_a_generator_that_left_the_mesh_and_still_runs_here_has_its_memory(make: Callable[..., World]) -> None:
    world = make(step_s=2.0)
    process = subprocess.Popen(["sleep", "60"])
    try:
        leaving = world.add("generator-0", pid=process.pid, host="here")
        world.add("generator-1")
        world.turns.give()
        leaving.hangs_at = "sleep FROZEN"
        del world.members["generator-0"]
        assert not world.turns.take(7)
        assert world.machine.taken_back == 1
        assert "onload" not in world.ranks.orders
        process.kill()
        process.wait()
        until(lambda: world.turns.take(7))
    finally:
        process.kill()
        process.wait()


def test_a_swap_towards_training_that_fails_is_taken_back_and_tried_again(make: Callable[..., World]) -> None:
    world = make()
    refusing, other = world.add("generator-0"), world.add("generator-1")
    world.generating()
    refusing.refusals = {"sleep WITHOUT_WEIGHTS": [WeightsError("cannot")]}
    assert not world.turns.take(7)
    assert world.machine.phase is Phase.GENERATING
    assert other.calls == SLEEPING + WAKING
    assert world.ranks.moves == []
    until(lambda: world.turns.take(7))


def test_a_learner_that_finds_no_memory_gives_back_what_it_has_taken(make: Callable[..., World]) -> None:
    world = make()
    generator = world.add("generator-0")
    world.generating()
    world.ranks.no_memory = 1
    assert not world.turns.take(7)
    assert world.ranks.moves == ["onload", "offload"]
    assert generator.calls == SLEEPING + WAKING
    until(lambda: world.turns.take(7))


@pytest.mark.parametrize("last", [False, True])
def test_devices_that_are_never_given_up_end_the_run(make: Callable[..., World], *, last: bool) -> None:
    world = make()
    generator = world.add("generator-0")
    world.generating()
    generator.refusals = {"sleep FROZEN": [WeightsError("never") for _ in range(3)]}
    with pytest.raises(SwapError, match="in 3 attempts; the last failed freezing: generator-0: never"):
        world.turns.require("a checkpoint", last=last)
    assert "onload" not in world.ranks.moves, "the generator has the memory"


def test_the_last_checkpoint_does_not_wait_for_a_generator_that_never_answers(make: Callable[..., World]) -> None:
    world = make(step_s=1.0)
    world.add("generator-0").hangs_at = "sleep FROZEN"
    world.generating()
    with pytest.raises(SwapError, match="in 3 attempts; the last failed freezing: generator-0: no answer"):
        world.turns.require("a checkpoint")
    world.turns.require("the last checkpoint", last=True)
    assert world.machine.phase is Phase.TRAINING
    assert world.ranks.moves[-1] == "onload"


def test_a_generator_that_cannot_wake_sleeps_on_while_others_generate(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator_group, "_RETRY_S", 0.1)
    world = make()
    world.add("generator-0")
    failing = world.add("generator-1")
    failing.refusals = {"wake VERIFIED": [WeightsError("differ")], "wake GENERATING": [WeightsError("differ")]}
    world.turns.give()
    assert world.machine.phase is Phase.GENERATING
    until(lambda: failing.calls.count("wake GENERATING") == 2)


def test_where_no_generator_can_wake_the_run_ends(make: Callable[..., World]) -> None:
    world = make()
    generator = world.add("generator-0")
    generator.refusals = {"wake VERIFIED": [WeightsError("differ") for _ in range(3)]}
    with pytest.raises(SwapError, match="woken in 3 attempts; the last: verifying: generator-0: differ"):
        world.turns.give()


def test_one_that_was_late_is_asked_again_in_the_next_attempt(make: Callable[..., World]) -> None:
    world = make()
    late, failing = world.add("generator-0"), world.add("generator-1")
    late.refusals = {"wake MEMORY": [WeightsError("not yet")]}
    failing.refusals = {"wake VERIFIED": [WeightsError("differ") for _ in range(3)]}
    world.turns.give()
    assert world.machine.phase is Phase.GENERATING
    assert late.calls[-1] == "wake GENERATING"


def test_a_request_that_comes_when_a_turn_is_about_to_begin_is_obeyed(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    world.add("generator-0")
    world.generating()
    begin_turn = world.requests.begin_turn

    def be_asked_first() -> bool:
        world.requests.hold(60.0)
        return begin_turn()

    monkeypatch.setattr(world.requests, "begin_turn", be_asked_first)
    assert not world.turns.take(7)
    assert world.machine.phase is Phase.GENERATING


def test_after_each_end_a_checkpoint_may_still_be_written(make: Callable[..., World]) -> None:
    world = make()
    generator = world.add("generator-0")
    world.ranks.full_disk = True
    with pytest.raises(SwapError, match="could not give its memory back: disk full"):
        world.turns.give()
    world.turns.require("a checkpoint")
    world.ranks.full_disk = False
    generator.refusals = {"wake MEMORY": [WeightsError("no") for _ in range(3)]}
    with pytest.raises(SwapError, match="woken in 3 attempts"):
        world.turns.give()
    world.turns.require("a checkpoint")
    assert world.ranks.moves[-1] == "onload"


def test_a_mesh_that_is_away_amid_a_swap_holds_up_no_generator_that_is_known(make: Callable[..., World]) -> None:
    world = make()
    generator = world.add("generator-0")
    world.generating()
    world.directory.away = True
    assert world.turns.take(7)
    assert generator.calls == SLEEPING
    world.turns.give()
    assert generator.calls == SLEEPING + WAKING


def test_an_error_that_is_no_steps_leaves_the_devices_with_one_side(make: Callable[..., World]) -> None:
    world = make()
    world.add("generator-0")
    world.versions.failure = WeightsError("not published")
    with pytest.raises(WeightsError):
        world.turns.give()
    assert world.machine.phase is Phase.GENERATING
    assert world.phases()[-1] == "generating"
    world.turns.require("a checkpoint")
    assert world.machine.phase is Phase.TRAINING


def test_one_that_does_not_wake_holds_up_the_others_once(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator_group, "_LATE_S", 0.5)
    # The others' step is over long before its own time is.
    world = make(step_s=100 * _S)
    other, silent = world.add("generator-0"), world.add("generator-1")
    silent.hangs_at = "wake MEMORY"
    world.turns.give()
    assert other.calls[:4] == WAKING
    until(lambda: silent.calls[:2] == ["wake MEMORY", "wake GENERATING"])


def test_a_generator_that_starts_again_under_its_name_is_not_waited_for(make: Callable[..., World]) -> None:
    world = make()
    world.add("generator-0")
    restarting = world.add("generator-1")
    world.turns.give()
    restarting.hangs_at = "sleep FROZEN"
    taken: Future[bool] = Future()
    threading.Thread(target=lambda: taken.set_result(world.turns.take(7))).start()
    until(lambda: "sleep FROZEN" in restarting.calls)
    world.kill("generator-1")
    world.add("generator-1")
    assert taken.result(_S)


def test_a_generator_that_comes_later_is_woken(make: Callable[..., World]) -> None:
    world = make()
    world.turns.give()
    newcomer = world.add("generator-0")
    until(lambda: newcomer.calls == ["wake GENERATING"])
    assert world.turns.take(7)
    assert newcomer.calls == ["wake GENERATING", *SLEEPING]


def test_a_generator_that_another_has_put_to_sleep_is_woken_again(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator_group, "_GAUGE_S", 0.3)
    world = make()
    generator = world.add("generator-0")
    world.generating()
    world.members["generator-0"].gauges[ASLEEP] = 1.0
    until(lambda: generator.calls[:1] == ["wake GENERATING"])


def test_another_learner_that_took_the_run_over_ends_this_one(make: Callable[..., World]) -> None:
    world = make()
    generator = world.add("generator-0")
    world.generating()
    generator.refusals = {"sleep FROZEN": [FencedError(), FencedError()]}
    # One generator's word is a refusal like others.
    assert not world.turns.take(7)
    assert world.machine.taken_back == 1
    world.directory.fenced.set()
    until(lambda: world.machine.pause_s == 0)
    with pytest.raises(FencedError):
        world.turns.take(7)


def test_a_turn_waits_for_its_batches_and_for_an_evaluation_and_serves_requests_meanwhile(
    make: Callable[..., World],
) -> None:
    world = make()
    world.add("generator-0")
    world.turns.give()
    world.table = TableView(generating=4, ready=0, leased=4)
    assert not world.turns.take(7)
    assert world.ranks.orders[-1] == "wait"
    world.table = TableView(generating=4, ready=4, leased=4, evaluating=True)
    assert not world.turns.take(7)
    world.table = replace(world.table, evaluating=False)
    world.controls.request_checkpoint()
    assert not world.turns.take(7)
    world.controls.pop_checkpoint_requests()
    assert world.turns.take(7)


def test_a_turn_ends_when_its_batches_are_trained_or_none_is_there(make: Callable[..., World]) -> None:
    world = make()
    world.add("generator-0")
    world.generating()
    assert world.turns.take(7)
    world.turns.batch_trained()
    world.turns.settle(8)
    assert world.machine.phase is Phase.TRAINING
    world.turns.batch_trained()
    world.turns.settle(9)
    assert world.machine.phase is Phase.GENERATING
    assert world.turns.take(9)
    world.table = TableView(generating=4, ready=3, leased=0)
    world.turns.settle(9)
    assert world.machine.phase is Phase.GENERATING


def test_who_asks_the_learner_to_yield_is_answered_when_generators_have_the_devices(
    make: Callable[..., World],
) -> None:
    world = make()
    world.add("generator-0")
    world.generating()
    assert world.turns.take(7)
    yielded = world.requests.hold(60.0)
    assert not yielded.done()
    world.turns.settle(7)
    assert yielded.done()
    assert not world.turns.take(7)
    again = world.requests.hold(60.0)
    world.turns.settle(7)
    assert again.done()
    world.requests.resume()
    assert world.turns.take(7)
