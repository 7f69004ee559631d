"""An engine that is frozen ends its generator; one that is busy does not."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.generators import engine_watch
from rollmesh.generators.engine_watch import FrozenEngineError, bounds_of, watch
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.hf import engine as hf
from rollmesh.generators.engines.hf.decoder import Decoder
from rollmesh.generators.engines.types import SleepLevel, WakeStep
from rollmesh.mesh.errors import StuckError
from rollmesh.mesh.liveness.freeze_detector import FreezeDetector, FreezeKind, ProcessState, ThreadState
from rollmesh.mesh.liveness.process_state import read_process_trees
from tests.generators.engines.external.driven_harness import RestartingHarness, ScriptedHarness
from tests.generators.engines.external.scripted import ScriptedBackend
from tests.generators.engines.harness import V1, request
from tests.generators.world import DEADLINE_S, mesh


@pytest.fixture
def harness() -> Iterator[ScriptedHarness]:
    harness = ScriptedHarness()
    yield harness
    harness.close()


@pytest.mark.parametrize(
    ("state", "kind", "seconds"),
    [
        (ThreadState.STOPPED, FreezeKind.STOPPED, 20),
        (ThreadState.RUNNABLE, FreezeKind.RUNNING, 600),
        (ThreadState.ASLEEP, FreezeKind.ASLEEP, 180),
    ],
)
def test_only_a_stopped_engine_is_judged_as_soon_as_a_service(
    state: ThreadState, kind: FreezeKind, seconds: int
) -> None:
    """One that compiles for minutes, on any number of threads, answers afterwards."""
    judge = FreezeDetector(bounds_of(20.0))
    for second in range(seconds):
        found = ProcessState(state, dict.fromkeys(range(8), second * (state is ThreadState.RUNNABLE)))
        assert judge.observe_silence(float(second), found) is None
    verdict = judge.observe_silence(
        float(seconds), ProcessState(state, dict.fromkeys(range(8), seconds * (state is ThreadState.RUNNABLE)))
    )
    assert verdict is not None
    assert verdict.kind is kind


def test_switched_off_nothing_is_frozen() -> None:
    bounds = bounds_of(0.0)
    assert bounds.stopped_s == bounds.running_s == bounds.asleep_s == math.inf


def _never() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_who_does_not_answer_is_found_by_what_its_processes_do(harness: ScriptedHarness) -> None:
    harness.update(V1, harness.constant_weights(10))
    harness.backend.hooks["ping"] = _never
    harness.backend.does = ThreadState.STOPPED
    with pytest.raises(FrozenEngineError, match="stopped by a signal") as caught:
        await asyncio.wait_for(watch(harness.engine, 0.2), DEADLINE_S)
    assert "frozen_after_s" in str(caught.value)
    assert caught.value.exit_code == StuckError.exit_code, "its restart counts as one of what hung"
    assert harness.engine.status().failure is None, "its watcher ends it"


@pytest.mark.parametrize("does", [ThreadState.RUNNABLE, ThreadState.ASLEEP])
async def test_an_engine_that_starts_has_a_deadline_of_its_own(
    does: ThreadState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may compile, or wait for a disk, without an answer."""
    started: threading.Event = threading.Event()

    class Slow(ScriptedHarness):
        def build(self, listener):  # type: ignore[no-untyped-def] # as its base
            self.backend.does = does
            self.backend.hooks["start"] = lambda: asyncio.get_running_loop().run_in_executor(None, started.wait)
            return super().build(listener)

    monkeypatch.setattr("rollmesh.mesh.liveness.watchdog.ASK_EVERY_S", 0.01)
    harness = Slow()
    try:
        watching = asyncio.create_task(watch(harness.engine, 0.05))
        done, _ = await asyncio.wait({watching}, timeout=1.0)
        assert not done
        watching.cancel()
        assert "ping" not in harness.backend.calls
        started.set()
        harness.update(V1, harness.constant_weights(10))
        await asyncio.wrap_future(harness.engine.ping())
        assert "ping" in harness.backend.calls
    finally:
        started.set()
        harness.close()


class _Restarting(RestartingHarness):
    """Each start of its backend but the first hangs; `child` is its process."""

    child: subprocess.Popen[bytes] | None = None

    def _create(self) -> ScriptedBackend:
        backend = super()._create()
        if self.ended:
            backend.hooks["start"] = self._hang
            monitored = backend.process_state
            backend.process_state = lambda: (  # type: ignore[method-assign]
                monitored() if self.child is None else read_process_trees([self.child.pid])
            )
        return backend

    def _hang(self) -> asyncio.Future[None]:
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        return _never()


@pytest.fixture
def restarting() -> Iterator[_Restarting]:
    harness = _Restarting()
    yield harness
    harness.close()
    if harness.child is not None:
        harness.child.kill()
        harness.child.wait()


async def test_processes_that_are_stopped_while_they_start_again_are_found(
    restarting: _Restarting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.mesh.liveness.watchdog.ASK_EVERY_S", 0.01)
    restarting.update(V1, restarting.constant_weights(10))
    watching = asyncio.create_task(watch(restarting.engine, 0.2))
    await asyncio.wrap_future(restarting.engine.sleep(SleepLevel.WITHOUT_WEIGHTS))
    waking = restarting.engine.wake(WakeStep.WEIGHTS)
    while restarting.child is None:
        await asyncio.sleep(0.01)
    done, _ = await asyncio.wait({watching}, timeout=0.5)
    assert not done, "nothing is wrong"
    os.kill(restarting.child.pid, signal.SIGSTOP)
    with pytest.raises(FrozenEngineError, match="stopped by a signal"):
        await asyncio.wait_for(watching, DEADLINE_S)
    await asyncio.to_thread(restarting.engine.stop)
    with pytest.raises(EngineError, match="stopped"):
        waking.result(0)
    assert restarting.backend.calls[-1] == "stop"


async def test_a_start_that_lasts_longer_than_a_step_of_a_swap_ends_the_engine() -> None:
    """So the next attempt does not wait for the same start."""
    harness = _Restarting(restart_timeout_s=0.1)
    try:
        harness.update(V1, harness.constant_weights(10))
        await asyncio.wrap_future(harness.engine.sleep(SleepLevel.WITHOUT_WEIGHTS))
        harness.engine.wake(WakeStep.WEIGHTS)
        assert "placement.step_timeout_s" in str(harness.collector.wait_failure())
    finally:
        harness.close()
        assert harness.child is not None
        harness.child.kill()
        harness.child.wait()


async def test_questions_that_are_lost_say_nothing(harness: ScriptedHarness) -> None:
    """A server that is too busy to answer in time: the engine continues."""

    def lost() -> None:
        raise EngineError("no answer within 60 s")

    harness.update(V1, harness.constant_weights(10))
    harness.backend.hooks["ping"] = lost
    harness.backend.does = ThreadState.RUNNABLE
    watching = asyncio.create_task(watch(harness.engine, 0.2))
    while harness.backend.calls.count("ping") < 20:
        await asyncio.sleep(0.01)
        assert not watching.done()
    watching.cancel()
    assert len(harness.run([request("a", max_tokens=5)])[0].sampled.response_ids) == 5


async def test_a_ping_that_goes_wrong_fails_the_engine(harness: ScriptedHarness) -> None:
    def wrong() -> None:
        raise RuntimeError("no such call")

    harness.backend.hooks["ping"] = wrong
    asked = harness.engine.ping()
    assert "no such call" in str(harness.collector.wait_failure())
    with pytest.raises(EngineError, match="no such call"):
        asked.result(DEADLINE_S)


async def test_a_decoding_thread_that_hangs_ends_its_generator_and_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event loop answers all the while: health checks, heartbeats, and for the leases that it holds."""
    let_go, hung = threading.Event(), threading.Event()
    step = Decoder.step

    def hang_once(self: Decoder, *arguments: Any) -> Any:
        if not hung.is_set():
            hung.set()
            let_go.wait()
        return step(self, *arguments)

    monkeypatch.setattr(Decoder, "step", hang_once)
    monkeypatch.setattr(hf, "_STOP_S", 0.5)
    monkeypatch.setattr(engine_watch, "_ASLEEP_FACTOR", 1.0)
    monkeypatch.setattr("rollmesh.mesh.liveness.watchdog.ASK_EVERY_S", 0.05)
    async with mesh(tmp_path, resources__frozen_after_s=0.5) as world:
        learner = await world.learner()
        await learner.publish(0)
        await learner.seed(4)
        task, _ = world.generator("gen-1")
        try:
            with pytest.raises(FrozenEngineError, match="asleep, and answered nothing"):
                await asyncio.wait_for(task, DEADLINE_S)
            assert hung.is_set()
            world.generator("gen-2")
            batch = await learner.train(0)
            assert {member.generator for group in batch for member in group.members} == {"gen-2"}
        finally:
            let_go.set()
