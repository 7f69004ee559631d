"""Failed groups keep their cause and their prompt, and can be driven again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollmesh.buffer.client.client import PendingWrite
from rollmesh.buffer.server.process import BufferFront
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import trajectory_pb2 as trajectory
from tests.buffer.mesh_fixture import TIMEOUT_S, Generator, Learner, Mesh, head_of_write, make_config, prompts_of
from tests.buffer.packed import read_counter, set_counter, set_rule
from tests.buffer.test_flow import balanced
from tests.command import Command

V0 = PolicyVersion(1, 0)


async def fail(generator: Generator, grants: list[pb.GroupGrant], *reasons: str) -> None:
    """All members of the groups say that they could not be scored."""
    writes = [
        PendingWrite(
            head_of_write(
                grant,
                trajectory.MemberMeta(
                    member=member, outcome=trajectory.OUTCOME_ERROR, reason=reasons[member % len(reasons)]
                ),
            )
        )
        for grant in grants
        for member in range(grant.task.n)
    ]
    await generator.writer().write(writes)


async def failures(learner: Learner) -> list[pb.FailedGroup]:
    """The notes, the latest first."""
    return list((await learner.client.ledger("train", 100)).failed)


async def keeps_prompt(front: BufferFront, ordinal: int) -> bool:
    return bool(await prompts_of(front, ordinal))


async def prompt_is_gone(front: BufferFront, ordinal: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while await keeps_prompt(front, ordinal):
            await asyncio.sleep(0.02)


async def test_a_failed_group_keeps_its_causes_and_its_prompt_and_is_trained_once_driven_again(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 2, end_of_data=True)
    admission, sampler = generator.admission(), learner.sampler()
    admission.update(2, V0)
    lost, good = await generator.grants(admission, 2)
    await fail(generator, [lost], "reward: timeout", "reward: timeout")
    (note,) = await failures(learner)
    assert (note.group_id, note.task_id, note.ordinal) == (lost.group_id, "task-1", 1)
    assert (note.reason, note.attempts, list(note.causes)) == ("too_few_scored", 1, ["reward: timeout"])
    assert not note.redriven
    assert note.failed_unix_ms > 1_600_000_000_000

    answer = await learner.client.redrive("train", [lost.group_id, "train-77"])
    assert (answer.redriven, list(answer.unknown)) == (1, ["train-77"])
    # The data had ended; the run trains the prompt nevertheless, in the same batch.
    await generator.finish(generator.writer(), [good], V0)
    admission.update(1, V0)
    (again,) = await generator.grants(admission, 1)
    assert (again.parent_group_id, again.attempt) == (lost.group_id, 1)
    assert again.task == lost.task
    await generator.finish(generator.writer(), [again], V0)
    groups = await learner.batch(sampler, 2, 0)
    assert {g.task.ordinal for g in groups} == {1, 2}
    assert (await learner.train(groups, 0)).claimed

    counts = await balanced(learner)
    assert (counts.redriven, counts.seeded_tasks, counts.admitted, counts.failed) == (1, 3, 3, 1)
    (note,) = await failures(learner)
    assert note.redriven
    assert list((await learner.client.redrive("train", [lost.group_id])).unknown) == [lost.group_id]
    assert (await learner.client.redrive("train")).redriven == 0
    assert (await learner.client.commit("train", 1, 1, "")).trained == 2
    await prompt_is_gone(front, 1)


async def test_notes_are_bounded_and_the_prompt_of_what_made_room_is_removed(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await set_rule(front, "train", "failed_kept", 2)
    await learner.seed(1, 3)
    admission = generator.admission()
    for _ in range(3):
        admission.update(1, V0)
        await fail(generator, await generator.grants(admission, 1), "a", "b")
    notes = await failures(learner)
    assert [(n.ordinal, sorted(n.causes)) for n in notes] == [(3, ["a", "b"]), (2, ["a", "b"])]
    await prompt_is_gone(front, 1)
    assert await keeps_prompt(front, 2)
    assert await keeps_prompt(front, 3)
    assert list((await learner.client.redrive("train", ["train-1"])).unknown) == ["train-1"]
    assert (await learner.client.redrive("train")).redriven == 2
    assert (await balanced(learner)).pending == 2


async def test_what_cannot_be_trained_again_is_not_driven_again(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url)
    left, right = await mesh.front(config), await mesh.front(config)
    learner, generator = await mesh.learner(left), await mesh.generator(right)
    await learner.seed(1, 1)
    await left.access.client.delete(*await prompts_of(left, 1))
    admission = generator.admission()
    admission.update(1, V0)
    async with asyncio.timeout(TIMEOUT_S):
        while not (notes := await failures(learner)):
            await asyncio.sleep(0.02)
    (note,) = notes
    assert note.reason == "payload_lost"
    answer = await learner.client.redrive("train", [note.group_id])
    assert (answer.redriven, list(answer.unknown)) == (0, [note.group_id])
    assert (await balanced(learner)).pending == 0


Ledger = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
def ledger(rollmesh: Command) -> Ledger:
    """`await ledger(front, *arguments)`: exit code, stdout and stderr of `rollmesh ledger`, beside this loop."""

    async def run(front: BufferFront, *arguments: str) -> tuple[int, str, str]:
        ended = await asyncio.to_thread(rollmesh, "ledger", "--mesh", front.address, *arguments)
        return ended.returncode, ended.stdout, ended.stderr

    return run


async def test_the_ledger_command_lists_failures_and_drives_them_again(mesh: Mesh, ledger: Ledger) -> None:
    front, learner, generator, _, grants = await mesh.granted(2)
    await fail(generator, grants, "scorer [x] broke", "no sandbox")
    gid = grants[0].group_id

    code, out, _ = await ledger(front, "--failed")
    line = next(line for line in out.splitlines() if line.strip().startswith(gid))
    assert code == 0
    assert ("too_few_scored" in line, "task-1" in line, "scorer [x] broke" in line) == (True, True, True)
    assert "no sandbox" in out
    assert "no failed groups are kept" in out.partition("table eval")[2]

    code, out, _ = await ledger(front, "--redrive", gid, "--failed", "--json")
    shown: dict[str, Any] = json.loads(out)
    assert (code, shown["balances"], shown["redriven"]) == (0, True, {"train": 1})
    notes = {note["group"]: note for note in shown["tables"]["train"]["failed_groups"]}
    assert [notes[g.group_id]["redriven"] for g in grants] == [True, False]
    assert sorted(notes[gid]["causes"]) == ["no sandbox", "scorer [x] broke"]

    code, _, err = await ledger(front, "--redrive", gid, "--redrive", "elsewhere")
    assert (code, f"not queued again: elsewhere, {gid}" in err) == (3, True)
    code, out, _ = await ledger(front, "--redrive", "all")
    assert (code, "table train: 1 prompt(s) queued again" in out) == (0, True)
    assert (await balanced(learner)).redriven == 2


async def test_the_ledger_command_fails_where_the_books_do_not_balance(mesh: Mesh, ledger: Ledger) -> None:
    front = await mesh.front()
    await mesh.learner(front)
    await set_counter(front, "train", "admitted", 1 + await read_counter(front, "train", "admitted"))
    code, out, _ = await ledger(front)
    assert (code, "DIFFERS: admitted" in out) == (1, True)
