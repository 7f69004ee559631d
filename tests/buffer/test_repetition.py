"""An act done twice, by retries, reconnects and learners of the past, changes nothing the second time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgpack
import pytest

from rollmesh.buffer.protocol.limits import MAX_ORDINAL
from rollmesh.buffer.server.process import BufferFront
from rollmesh.buffer.store.keys import Keys
from rollmesh.buffer.store.unowned_values import sweep_unowned_values
from rollmesh.mesh.errors import FencedError, PayloadError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.buffer.mesh_fixture import TIMEOUT_S, Mesh, make_config, make_task, prompts_of, refs

V0 = PolicyVersion(1, 0)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Waits for what the upkeep of a front brings about."""
    async with asyncio.timeout(TIMEOUT_S):
        while not await holds():
            await asyncio.sleep(0.02)


async def _no_prompt(front: BufferFront, ordinal: int, table: str = "train") -> bool:
    return not await prompts_of(front, ordinal, table)


async def test_a_repeated_seed_does_not_take_back_what_it_has_added(mesh: Mesh) -> None:
    learner = await mesh.learner(await mesh.front())
    for _ in range(2):  # the answer to the first was lost
        await learner.client.seed("eval", 1, [make_task(1), make_task(2)], withdraw_pending=True, end_of_data=True)
    counts = (await learner.client.describe("eval")).counts
    assert (counts.pending, counts.withdrawn, counts.seeded_tasks) == (2, 0, 2)
    again = await learner.client.seed("eval", 1, [make_task(3)], withdraw_pending=True)
    assert (again.added, again.withdrawn) == (1, 2)


async def test_a_repeated_seed_leaves_no_prompt_behind(mesh: Mesh) -> None:
    front = await mesh.front()
    learner = await mesh.learner(front)
    await learner.seed(1, 1)
    await learner.client.seed("train", 1, [], withdraw_pending=True)
    await until(lambda: _no_prompt(front, 1))
    await learner.seed(1, 1)
    assert await _no_prompt(front, 1), "its task has ended: no one would remove it again"


async def test_a_learner_of_the_past_does_not_touch_prompts(mesh: Mesh) -> None:
    front = await mesh.front()
    zombie = await mesh.learner(front)
    learner = await mesh.learner(front, takeover=True)
    await learner.seed(1, 1)
    before = await prompts_of(front, 1)
    other = make_task(1)
    other.task_id = "of the past"
    with pytest.raises(FencedError):
        await zombie.client.seed("train", 1, [other, make_task(2)])
    assert await prompts_of(front, 1) == before
    assert await _no_prompt(front, 2)


async def test_a_new_stream_without_groups_begins_a_full_term(mesh: Mesh) -> None:
    front, _, generator, admission, grants = await mesh.granted(seeded=2)
    await generator.client.release("train", generator.agent.member_id, generator.agent.generation, refs(grants))
    client, holders = front.access.client, Keys(front.run_name).table("train", "holders")
    term = await client.zscore(holders, generator.agent.member_id)
    await admission.close()

    async def is_short() -> bool:
        until = await client.zscore(holders, generator.agent.member_id)
        return until is None or until < term

    await until(is_short)
    fresh = generator.admission()
    fresh.update(1, V0)
    await generator.grants(fresh, 1)
    assert await client.zscore(holders, generator.agent.member_id) >= term


async def test_a_member_that_is_gone_leaves_no_stream_behind(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"lease_s": 1.0, "redis": mesh.redis_url})
    generator = await mesh.generator(front)
    member, client = generator.agent.member_id, front.access.client
    streams = Keys(front.run_name).table("train", "streams")
    # As a front that was killed leaves it: the stream's end was never recorded.
    await client.hset(streams, member, "of a dead front")
    await generator.kill()

    async def is_forgotten() -> bool:
        return not await client.hexists(Keys(front.run_name).members, member)

    await until(is_forgotten)
    assert not await client.hexists(streams, member)


async def test_the_largest_ordinal_is_written_in_full_by_the_scripts(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    task = make_task(MAX_ORDINAL)
    await learner.client.seed("train", 1, [task])
    admission = generator.admission()
    admission.update(1, V0)
    (grant,) = await generator.grants(admission, 1)
    assert grant.task == task
    await learner.client.seed("eval", 1, [task])
    await learner.client.seed("eval", 1, [], withdraw_pending=True)
    await until(lambda: _no_prompt(front, MAX_ORDINAL, "eval"))
    with pytest.raises(PayloadError, match="ordinal"):
        await learner.client.seed("train", 1, [make_task(MAX_ORDINAL + 1)])


async def test_a_learner_that_is_fenced_between_look_and_set_replaces_no_prompt(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has looked before its successor took over, and stores its prompt after the successor has seeded."""
    front = await mesh.front()
    zombie = await mesh.learner(front)
    access, looked, proceed = front.access, asyncio.Event(), asyncio.Event()
    after = access.run_after

    async def held_up(commands: Any, verb: str, *arguments: Any) -> list[Any]:
        if verb == "seed" and not looked.is_set():
            looked.set()
            await proceed.wait()
        return await after(commands, verb, *arguments)

    monkeypatch.setattr(access, "run_after", held_up)
    other = make_task(1)
    other.task_id = "of the past"
    late = asyncio.create_task(zombie.client.seed("train", 1, [other]))
    await asyncio.wait_for(looked.wait(), TIMEOUT_S)
    learner, generator = await mesh.learner(front, takeover=True), await mesh.generator(front)
    await learner.seed(1, 1)
    proceed.set()
    with pytest.raises(FencedError):
        await late
    admission = generator.admission()
    admission.update(1, PolicyVersion(2, 0))
    (grant,) = await generator.grants(admission, 1)
    assert grant.task == make_task(1)
    assert len(await prompts_of(front, 1)) == 2
    for _ in range(2):
        await sweep_unowned_values(access, Keys(front.run_name), "train", age_s=0, pause_s=0)
    (kept,) = await prompts_of(front, 1)
    assert await front.access.client.get(kept) == make_task(1).SerializeToString()


async def test_an_ordinal_that_is_given_again_has_its_new_prompt_at_every_front(mesh: Mesh) -> None:
    """Redis lost the first seeding, and a front that knows its prompt has not noticed."""
    config = make_config(mesh.folder, mesh.redis_url)
    left, right = await mesh.front(config), await mesh.front(config)
    learner, first, second = await mesh.learner(left), await mesh.generator(right), await mesh.generator(right)
    redis, table = left.access.client, Keys(left.run_name).table("train")
    before = {key: await redis.dump(key) for key in await redis.keys(f"{table}*")}
    counters = msgpack.unpackb(await redis.hget(table, "counters"))
    await learner.seed(1, 1)
    admission, again = first.admission(), second.admission()
    admission.update(1, V0)
    (grant,) = await first.grants(admission, 1)
    assert grant.task == make_task(1)
    async with redis.pipeline(transaction=True) as pipe:
        pipe.delete(*await redis.keys(f"{table}*"))
        for key, value in before.items():
            pipe.restore(key, 0, value)
        # Others have moved beyond all that this front had seen.
        pipe.hset(table, "counters", msgpack.packb({**counters, "rev": 1 << 40}))
        await pipe.execute()
    other = make_task(1)
    other.task_id = "given again"
    assert (await learner.client.seed("train", 1, [other])).added == 1
    again.update(1, V0)
    (grant,) = await second.grants(again, 1)
    assert grant.task == other
