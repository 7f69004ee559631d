"""Broadcasts with members that stop, die, come late and come back: the others continue, over grpc if need be."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.generators.weights.transports import choose, transports
from rollmesh.generators.weights.transports.broadcast import Broadcast
from rollmesh.generators.weights.verified_transfer import VerifiedWeights, receive_verified
from rollmesh.learner.weights.transports import Broadcast as Offered
from rollmesh.learner.weights.transports.broadcast import _Suspension as Suspension
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights import BucketSet
from rollmesh.mesh.weights import broadcast as group_module
from rollmesh.protos import weights_pb2
from tests.generators.forked import ForkedProgram, fork
from tests.generators.weights.transports.cases import CASES, NCCL
from tests.generators.weights.transports.world import Case, Learner, LocalLearner, local_learner

CASE = next(case for case in CASES if case.name == "gloo")
DEADLINE_S = 240.0
STALL_S = 2.0
PATIENCE_S = 3.0


class Receiver:
    """Receives like a generator whose setting is gloo, or nccl."""

    def __init__(self, member_id: str, setting: str = CASE.name) -> None:
        self.member_id, self._setting = member_id, setting
        self.transports = transports("a host of its own")

    async def get(self, learner: Learner, bucket_set: BucketSet, timeout_s: float = PATIENCE_S) -> VerifiedWeights:
        fetch = learner.fetch(bucket_set, timeout_s, self.member_id)
        *first, last = choose(self.transports, self._setting, bucket_set)
        for transport in first:
            try:
                return await receive_verified(transport, fetch)
            except WeightsError:
                continue
        return await receive_verified(last, fetch)

    async def close(self) -> None:
        for transport in self.transports:
            await transport.close()


def offered(learner: LocalLearner) -> Offered:
    return next(offer for offer in learner.publisher.offers if isinstance(offer, Offered))


@asynccontextmanager
async def receivers(count: int) -> AsyncIterator[list[Receiver]]:
    made = [Receiver(f"here-{index}") for index in range(count)]
    try:
        yield made
    finally:
        for receiver in made:
            await receiver.close()


async def together(
    learner: LocalLearner, members: list[Receiver], manifest: weights_pb2.Manifest
) -> list[VerifiedWeights]:
    bucket_set = BucketSet.full(manifest)
    gets = [member.get(learner, bucket_set) for member in members]
    return await asyncio.wait_for(asyncio.gather(*gets), DEADLINE_S)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_group_is_kept_until_its_members_change(tmp_path: Path) -> None:
    async with local_learner(CASE, tmp_path) as learner, receivers(3) as members:
        gloo = offered(learner)
        gloo._window_s = DEADLINE_S
        names = []
        for version, present in enumerate([2, 2, 2, 3, 3]):
            gloo._expected = {member.member_id for member in members[:present]}
            manifest = learner.publish(version)
            got = await together(learner, members[:present], manifest)
            assert [one.transport for one in got] == ["gloo"] * present
            assert len({bytes(one.data) for one in got}) == 1
            assert gloo._kept is not None
            names.append(gloo._kept.group.name)
        assert names == ["1-1", "1-1", "1-1", "1-2", "1-2"]


async def test_a_stopped_receiver_holds_up_no_one(tmp_path: Path) -> None:
    async with (
        stopping_receiver(CASE) as (process, start),
        receivers(2) as members,
        local_learner(CASE, tmp_path) as learner,
    ):
        gloo = offered(learner)
        # All three are expected, so that nothing depends on how soon they come.
        gloo._expected, gloo._window_s = {"here-0", "here-1", "stops"}, DEADLINE_S
        gloo._timeout_s = STALL_S
        bucket_set = BucketSet.full(learner.publish(0, rows=12_000))
        await start(learner)
        first = [asyncio.create_task(member.get(learner, bucket_set)) for member in members]
        await asyncio.wait_for(_stopped(process.pid), DEADLINE_S)
        assert not any(task.done() for task in first)
        # The learner trains and publishes meanwhile.
        manifest = learner.publish(1)
        assert not any(task.done() for task in first)
        for verified in await asyncio.wait_for(asyncio.gather(*first), DEADLINE_S):
            assert verified.transport == "grpc"
        assert set(gloo._suspended) <= {"stops", "here-0", "here-1"}
        assert gloo._suspended["stops"].rounds == 2
        # A member that waited for the one that stopped may have been late as well.
        gloo._suspended.clear()
        gloo._expected, gloo._window_s = {"here-0", "here-1"}, DEADLINE_S
        # The next version is broadcast among those that live.
        for verified in await together(learner, members, manifest):
            assert verified.transport == "gloo"
        process.send_signal(signal.SIGCONT)
        assert json.loads(await process.readline()) == "grpc"


async def test_who_comes_late_takes_another_way_and_part_in_the_next(tmp_path: Path) -> None:
    async with local_learner(CASE, tmp_path) as learner, receivers(2) as (first, late):
        bucket_set = BucketSet.full(learner.publish(0, rows=2_000))
        gloo = offered(learner)
        gloo._expected, gloo._window_s = {"here-0", "dead"}, DEADLINE_S
        gloo._timeout_s = STALL_S
        stub = learner.fetch(bucket_set).connection.weights
        request = weights_pb2.JoinBroadcastRequest(
            member_id="dead", policy=bucket_set.policy.to_proto(), transport="gloo"
        )
        # Settled with a member that never comes: all others are told so when its time is over.
        dead, got = asyncio.create_task(_join(stub, request)), asyncio.create_task(first.get(learner, bucket_set))
        answer = await asyncio.wait_for(dead, DEADLINE_S)
        assert answer.world_size == 3
        assert (await late.get(learner, bucket_set)).transport == "grpc"
        assert (await asyncio.wait_for(got, DEADLINE_S)).transport == "grpc"
        assert gloo._expected == {"here-0", "here-1"}
        # It may be one that cannot reach the rendezvous, and would join every round.
        with pytest.raises(Exception, match="dead held up the broadcast and is left out for 2 rounds more"):
            await _join(stub, request)
        for verified in await together(learner, [first, late], learner.publish(1)):
            assert verified.transport == "gloo"


async def test_who_holds_up_rounds_leaves_out_more_and_more(tmp_path: Path) -> None:
    async with local_learner(CASE, tmp_path) as learner, receivers(1) as (member,):
        gloo = offered(learner)
        gloo._suspended["here-0"] = Suspension(times=2, rounds=1)
        assert (await member.get(learner, BucketSet.full(learner.publish(0)))).transport == "grpc"
        # A round without it.
        async with receivers(2) as (_, other):
            bucket_set = BucketSet.full(learner.publish(1))
            assert (await other.get(learner, bucket_set, DEADLINE_S)).transport == "gloo"
            # Its members have all of it before the learner knows so, and until then it refuses others.
            await until(lambda: gloo._running is None)
            assert (await member.get(learner, bucket_set, DEADLINE_S)).transport == "gloo"
        await until(lambda: not gloo._suspended)


async def test_a_learner_that_is_replaced_while_members_are_awaited_is_an_error(tmp_path: Path) -> None:
    async with local_learner(CASE, tmp_path) as learner:
        gloo = offered(learner)
        gloo._expected, gloo._window_s = {"here-0", "never comes"}, DEADLINE_S
        bucket_set = BucketSet.full(learner.publish(0))
        fetch = learner.fetch(bucket_set, DEADLINE_S, "here-0")
        task = asyncio.create_task(receive_verified(learner.receiver(), fetch))
        await until(lambda: bool(gloo._joins))
        async with asyncio.timeout(DEADLINE_S):
            await learner._connection.close()
            # A CancelledError would end the task that receives without a word.
            with pytest.raises(WeightsError, match="the learner has changed"):
                await task


async def test_who_waits_for_others_when_the_learner_ends_is_told(tmp_path: Path) -> None:
    async with local_learner(CASE, tmp_path) as learner:
        gloo = offered(learner)
        gloo._expected, gloo._window_s = {"here-0", "never comes"}, DEADLINE_S
        joined = gloo.join("here-0", BucketSet.full(learner.publish(0)).policy, "")
        await asyncio.to_thread(gloo.close)
        with pytest.raises(WeightsError, match="the learner ends"):
            joined.result(0)


async def test_what_torch_has_to_say_ends_the_transfer_not_the_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise RuntimeError("out of memory")

    async with local_learner(CASE, tmp_path) as learner:
        offered(learner)._timeout_s = 0.5
        fetch = learner.fetch(BucketSet.full(learner.publish(0)), PATIENCE_S, "here-0")
        monkeypatch.setattr("rollmesh.generators.weights.transports.broadcast._Round._receive", no_memory)
        with pytest.raises(WeightsError, match="out of memory"):
            await asyncio.wait_for(receive_verified(learner.receiver(), fetch), DEADLINE_S)


async def test_a_group_that_cannot_be_formed_is_told_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no group")

    async with local_learner(CASE, tmp_path) as learner:
        monkeypatch.setattr("rollmesh.learner.weights.transports.broadcast.BroadcastGroup", fails)
        fetch = learner.fetch(BucketSet.full(learner.publish(0)), 10 * DEADLINE_S, "here-0")
        with pytest.raises(WeightsError, match="no group"):
            await asyncio.wait_for(receive_verified(learner.receiver(), fetch), DEADLINE_S)


async def test_joins_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    async with local_learner(CASE, tmp_path) as learner:
        bucket_set = BucketSet.full(learner.publish(0))
        nccl = BucketSet(
            bucket_set.policy, None, bucket_set.buckets, [weights_pb2.Offer(transport="nccl", address="x:1")]
        )
        assert "no broadcast over nccl" in Broadcast("nccl").refusal(bucket_set)
        assert Broadcast("gloo").refusal(nccl) == "the learner offers no broadcast over gloo"
        stub = learner.fetch(bucket_set).connection.weights
        with pytest.raises(Exception, match="broadcasts nothing over 'nccl'"):
            await stub.JoinBroadcast(
                weights_pb2.JoinBroadcastRequest(member_id="m", policy=bucket_set.policy.to_proto(), transport="nccl"),
                timeout=5,
            )


async def _join(stub: Any, request: weights_pb2.JoinBroadcastRequest) -> weights_pb2.JoinBroadcastResponse:
    return await stub.JoinBroadcast(request, timeout=60)


async def _stopped(pid: int) -> None:
    while "T (stopped)" not in Path(f"/proc/{pid}/status").read_text():
        await asyncio.sleep(0.01)


@asynccontextmanager
async def stopping_receiver(
    case: Case,
) -> AsyncIterator[tuple[ForkedProgram, Callable[[LocalLearner], Awaitable[None]]]]:
    """A receiver in a process of its own, which stops itself while its first bucket is under way."""
    process = await asyncio.to_thread(fork, "tests.generators.weights.transports.test_broadcast", case.name)

    async def start(learner: LocalLearner) -> None:
        manifest = learner.publisher.newest
        assert manifest is not None
        order = {"address": learner._connection.address, "manifest": manifest.SerializeToString().hex()}
        await process.write(json.dumps(order))

    try:
        assert json.loads(await process.readline()) == "ready"
        yield process, start
    finally:
        await process.end()


async def _receive_and_stop(case: Case) -> None:
    import torch

    torch.set_num_threads(1)
    if case.name == "nccl":
        # The learner has the first.
        torch.cuda.set_device(1)
    real = group_module.BroadcastGroup.finish_bucket

    def finish(self: group_module.BroadcastGroup, work: torch.distributed.Work) -> None:
        group_module.BroadcastGroup.finish_bucket = real  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGSTOP)
        real(self, work)

    group_module.BroadcastGroup.finish_bucket = finish  # type: ignore[method-assign]
    print(json.dumps("ready"), flush=True)
    order = json.loads(await asyncio.to_thread(sys.stdin.readline))
    learner = Learner(case, order["address"], Path("/"))
    receiver = Receiver("stops", case.name)
    bucket_set = BucketSet.full(weights_pb2.Manifest.FromString(bytes.fromhex(order["manifest"])))
    verified = await receiver.get(learner, bucket_set)
    print(json.dumps(verified.transport), flush=True)
    await receiver.close()
    await learner.close()


if __name__ == "__main__":
    asyncio.run(_receive_and_stop(next(case for case in (*CASES, NCCL) if case.name == sys.argv[1])))
