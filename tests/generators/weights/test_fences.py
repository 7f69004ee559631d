"""Weights under way when another learner comes: nothing of the former one is put into service after that."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path

import pytest

from rollmesh.generators.weights.pinned_groups import PinnedGroups
from rollmesh.generators.weights.verified_transfer import VerifiedWeights
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import BucketSet
from tests.generators.weights.test_receiver import mesh, same, weights

DEADLINE_S = 240.0


async def test_a_version_that_is_whole_when_another_learner_comes_is_not_put_into_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mesh(tmp_path) as world:
        old = await world.learner()
        receive = world.receiver._fetcher._receive

        async def and_then_another_comes(announcement: object, bucket_set: BucketSet) -> VerifiedWeights:
            received = await receive(announcement, bucket_set)  # type: ignore[arg-type]  # passed on
            if bucket_set.policy.incarnation == 1:
                new = await world.learner("learner-2")
                new.publisher.publish(PolicyVersion(2, 3), weights(3).items(), "float32")
                while world.receiver._incarnation < 2:
                    await asyncio.sleep(0.01)
            return received

        monkeypatch.setattr(world.receiver._fetcher, "_receive", and_then_another_comes)
        old.publisher.publish(PolicyVersion(1, 7), weights(7).items(), "float32")
        async with asyncio.timeout(DEADLINE_S):
            await world.receiver.has_weights.wait()
        assert world.engine.served == [PolicyVersion(2, 3)]
        assert same(world.engine, weights(3))


async def test_a_generator_that_comes_late_refuses_a_learner_that_is_fenced(tmp_path: Path) -> None:
    async with mesh(tmp_path) as world:
        world.membership.policy = PolicyVersion(2, 3)
        fenced = await world.learner()
        fenced.publisher.publish(PolicyVersion(1, 8), weights(8).items(), "float32")
        assert "incarnation 1 is over" in (await fenced.report()).error
        assert world.engine.served == []


async def test_a_swap_that_waits_when_another_learner_comes_is_called_off(tmp_path: Path) -> None:
    async with mesh(tmp_path) as world:
        old = await world.learner()
        never: Future[None] = Future()
        world.engine.hold.append(never)
        old.publisher.publish(PolicyVersion(1, 7), weights(7).items(), "float32")
        async with asyncio.timeout(DEADLINE_S):
            await world.engine.asked.wait()
            while world.receiver._swapping is None:
                await asyncio.sleep(0.01)
            new = await world.learner("learner-2")
            new.publisher.publish(PolicyVersion(2, 3), weights(3).items(), "float32")
            await world.receiver.has_weights.wait()
        assert world.engine.served == [PolicyVersion(2, 3)]
        assert same(world.engine, weights(3))
        assert world.receiver.announced(PolicyVersion(1, 7)) is None


async def test_news_at_the_end_of_a_pause_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with mesh(tmp_path) as world:
        learner = await world.learner()
        learner.publisher.publish(PolicyVersion(1, 0), weights(0).items(), "float32")
        async with asyncio.timeout(DEADLINE_S):
            await world.receiver.has_weights.wait()
        receiver = world.receiver
        monkeypatch.setattr(receiver, "_announced", asyncio.Event())
        older, newer = object(), object()

        async def ends_as_news_come(wait: object, _: float) -> None:
            wait.close()  # type: ignore[attr-defined]  # a coroutine
            receiver._pending = newer  # type: ignore[assignment]  # only passed on
            raise TimeoutError

        monkeypatch.setattr(asyncio, "wait_for", ends_as_news_come)
        await receiver._retry_after(0.0, older)  # type: ignore[arg-type]  # only passed on
        monkeypatch.undo()
        assert receiver._pending is newer
        receiver._pending = None


async def test_a_swap_that_waits_is_taken_back_for_pinned_episodes_and_asked_for_again(tmp_path: Path) -> None:
    waited = asyncio.Event()

    class Watched(PinnedGroups):
        async def finished(self) -> None:
            if self.active:
                waited.set()
            await super().finished()

    pinned = Watched()
    async with mesh(tmp_path, pinned=pinned) as world:
        learner = await world.learner()
        never: Future[None] = Future()
        world.engine.hold.append(never)
        learner.publisher.publish(PolicyVersion(1, 7), weights(7).items(), "float32")
        async with asyncio.timeout(DEADLINE_S):
            await world.engine.asked.wait()
            pinned.begin("group")
            pinned.hold_swap()
            await waited.wait()
            assert world.engine.served == []
            pinned.end("group")
            await world.receiver.has_weights.wait()
        assert world.engine.served == [PolicyVersion(1, 7)]
        assert same(world.engine, weights(7))
        assert (await learner.report()).error == ""
