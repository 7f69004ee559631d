"""Runs that stand still: named while they do, ended by name when they cannot continue; slow ones are left alone."""

from __future__ import annotations

import asyncio
import io
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollmesh.buffer.server.process import BufferFront
from rollmesh.launcher.console.tables import status_table
from rollmesh.launcher.mesh_client import MeshClient, Snapshot
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.coordinator import mesh_session
from rollmesh.learner.liveness.stall_detector import MAX_OBSERVATION_S
from rollmesh.learner.liveness.stall_reporter import StallReporter
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import StalledError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.wait import Wait
from rollmesh.report.stalls import read_stalls, stall_grid
from tests.buffer.mesh_fixture import Generator, Learner, make_write, refs
from tests.learner.live.test_runs import ledger, wait_for_line
from tests.learner.live.tiny import make_config, meanwhile, run_learner

V0 = PolicyVersion(1, 0)
_LIFE_S = 240.0
_FOR_GROUPS = 5


class Scripted:
    """A buffer, and members that do as they are told, in a thread of this process."""

    def __init__(self, config: Any) -> None:
        self._bridge = AsyncBridge("scripted")
        self._config = config
        self._actors: list[Generator | Learner] = []
        self._service = self.call(self._start())
        self.address = self._service.address

    def call(self, coroutine: Any) -> Any:
        return self._bridge.call(coroutine, _LIFE_S)

    async def _start(self) -> BufferFront:
        service = BufferFront(self._config, host="127.0.0.1", port=0)
        await service.start()
        return service

    async def holder(self, groups: int) -> tuple[Generator, list[Any]]:
        """A generator that takes groups, names them and lives; what it writes is the test's to say."""
        generator = Generator(self.address, "generator")
        self._actors.append(generator)
        self._answer_outsiders(generator, _FOR_GROUPS)
        await generator.agent.start()
        self._bridge.submit(self._answer_outsiders_on(generator))
        await self._tokens_known(generator)
        stream = generator.admission()
        stream.update(groups, V0)
        return generator, [await anext(stream) for _ in range(groups)]

    async def _answer_outsiders_on(self, generator: Generator) -> None:
        """Without end."""
        for tokens in itertools.count(_FOR_GROUPS + 1):
            await asyncio.sleep(0.1)
            self._answer_outsiders(generator, tokens)

    def _answer_outsiders(self, generator: Generator, tokens: int) -> None:
        """It has sampled so many tokens; nothing of that since the first ones is for the groups that it holds."""
        gauges = {"tokens_generated": float(tokens), "tokens_for_groups": float(_FOR_GROUPS)}
        generator.agent.set_status(serving=V0, gauges=gauges, wait=Wait("its tools are silent"))

    async def _tokens_known(self, generator: Generator) -> None:
        """Waits until the front counts the tokens of all generators: later it would take them for progress."""
        tokens = _FOR_GROUPS * sum(isinstance(actor, Generator) for actor in self._actors)
        async with asyncio.timeout(_LIFE_S):
            while (await generator.client.describe("train")).sampled_tokens < tokens:
                await asyncio.sleep(0.05)

    async def learner(self) -> Learner:
        learner = Learner(self.address, "learner")
        self._actors.append(learner)
        await learner.agent.start()
        learner.incarnation = (await learner.take_over(0)).incarnation
        await learner.client.set_policy_version(learner.incarnation, 0)
        return learner

    def close(self) -> None:
        for actor in self._actors:
            self.call(actor.close())
        self.call(self._service.stop())
        self._bridge.close()


@contextmanager
def scripted(config: Any) -> Iterator[Scripted]:
    world = Scripted(config)
    try:
        yield world
    finally:
        world.close()


def shown(snapshot: Snapshot) -> str:
    """As `rollmesh status` prints it."""
    console = Console(file=io.StringIO(), width=400)
    console.print(status_table(snapshot))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


class Clock:
    """The clock of the stall reporter: it stands before the limit until released, and then jumps at each look."""

    def __init__(self, max_s: float) -> None:
        self._until = time.monotonic() + max_s
        self._ahead_s = 0.0
        self.released = False

    def __call__(self) -> float:
        if self.released:
            self._ahead_s += MAX_OBSERVATION_S
        return min(time.monotonic(), self._until) + self._ahead_s


def test_a_generator_that_never_delivers_is_named_and_the_run_ends_by_name(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"reward.scorer_timeout_s": 0.1, "reward.timeout_s": 0.2, "rollout.reward_wait_s": 0.3}
    limits |= {"buffer.stall_s": 0.5, "buffer.stall_limit_s": 10.0, "buffer.lease_s": 4.0}
    clock = Clock(5.0)
    monkeypatch.setattr(mesh_session, "StallReporter", partial(StallReporter, clock=clock))
    config = make_config(tmp_path, {"data.eval": None, **limits})
    stalls = config.run.folder / "stalls.jsonl"
    looks: list[Snapshot] = []
    held = "holds 2 groups (train-1 for "

    async def look(address: str) -> Snapshot:
        async with MeshClient(address, SecuritySection()) as view:
            async with asyncio.timeout(_LIFE_S):
                while not (snapshot := await view.read_snapshot()).stalled_s or held not in snapshot.stall():
                    await asyncio.sleep(0.1)
            return snapshot

    with scripted(config) as world:

        def hold() -> None:
            world.call(world.holder(2))
            wait_for_line(stalls, lambda line: held in line["text"])
            looks.append(asyncio.run(look(world.address)))
            clock.released = True

        with meanwhile(hold):
            assert run_learner(config, world.address) == StalledError.exit_code
        counts = ledger(world.address).recounted
        assert (counts.generating, counts.trained) == (2, 0)
    said = capfd.readouterr().err
    (status,) = looks
    assert "stalled" in shown(status)
    for text in (said, shown(status), status.stall()):
        assert "generator generator-" in text
        assert held in text
        assert "last heartbeat" in text
        assert "ago: its tools are silent" in text
    assert "nothing has moved for" in said
    assert "raise buffer.stall_limit_s" in said
    assert "the next start continues from version 0" in said
    (stall,) = read_stalls(config.run.folder)
    assert held in stall.held
    assert stall.seconds >= 10.0
    assert stall.ended == "the run ended: buffer.stall_limit_s was reached"
    row = stall_grid([stall])[1]
    assert stall.held in row
    assert row[-1] == stall.ended


async def _advance(reporter: StallReporter, clock: list[float], learner: Learner, seconds: int) -> None:
    """So many seconds, in looks of ten."""
    for _ in range(seconds // 10):
        clock[0] += 10
        await reporter.observe(await learner.client.describe("train"))


def test_a_slow_run_is_left_alone_while_it_moves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Much time passes on the clock of the watchdog; the buffer, the learner and the generator are real."""
    config = make_config(tmp_path, {"data.eval": None, "buffer.lease_s": 60.0})
    controls, status, clock = ControlRequests(), LearnerStatus(phase="waiting_for_groups"), [0.0]

    async def run(world: Scripted) -> None:
        learner = await world.learner()
        await learner.seed(1, 2)
        generator, (first, second) = await world.holder(2)
        writer = generator.writer()
        reporter = StallReporter(
            learner.client, status, controls, config.run.folder, stall_s=60, limit_s=600, clock=lambda: clock[0]
        )
        for tokens in range(1, 20):
            draft = make_write(first, 0, [V0] * tokens)
            draft.head.draft = True
            await writer.write([draft])
            await _advance(reporter, clock, learner, 50)
        status.phase = "checkpointing"
        await _advance(reporter, clock, learner, 1200)
        status.phase = "waiting_for_groups"
        assert reporter.gauges() == {"stalled_seconds": 0, "stalled_seconds_total": 0, "stalls_total": 0}
        # It is given back and taken again for ever: grants are no progress.
        for _ in range(2):
            await generator.client.release(
                "train", generator.agent.member_id, generator.agent.generation, refs([second])
            )
            generator, (second,) = await world.holder(1)
            await _advance(reporter, clock, learner, 10)
        await _advance(reporter, clock, learner, 40)
        assert reporter.gauges()["stalls_total"] == 1
        assert "nothing has moved for" in caplog.text
        assert f"holds 1 group ({second.group_id} for " in caplog.text
        await writer.write([make_write(first, 0, [V0])])
        await _advance(reporter, clock, learner, 10)
        assert "groups move again after" in caplog.text
        controls.raise_failure()
        await _advance(reporter, clock, learner, 600)
        await reporter.close()

    config.run.folder.mkdir(parents=True)
    with scripted(config) as world:
        world.call(run(world))
    with pytest.raises(StalledError, match=r"buffer.stall_limit_s: 600.*holds 1 group"):
        controls.raise_failure()
    assert [stall.ended for stall in read_stalls(config.run.folder)] == [
        "groups move again",
        "the run ended: buffer.stall_limit_s was reached",
    ]
