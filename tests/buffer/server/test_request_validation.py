"""A value over a limit is refused by name, cut where it is mere text, and stops no other caller."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from rollmesh.buffer.protocol.limits import MAX_TASK_BYTES, MESSAGE_MEMBERS, MESSAGE_PAYLOAD_BYTES, META_BYTES
from rollmesh.buffer.server.request_validation import check_group_id, check_tasks
from rollmesh.buffer.store.keys import Keys
from rollmesh.mesh.errors import PayloadError, RollmeshError
from rollmesh.mesh.membership import PROTOCOL
from rollmesh.mesh.request_fields import check_id
from rollmesh.mesh.rpc.errors import to_rollmesh_error
from rollmesh.mesh.text import REASON_CHARACTERS, WAITING_CHARACTERS, bounded
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.wait import Wait
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import membership_pb2
from tests.buffer.mesh_fixture import TIMEOUT_S, Generator, Mesh, make_failure, make_task, make_write
from tests.buffer.test_flow import balanced

V0 = PolicyVersion(1, 0)


def test_a_text_is_cut_with_a_mark() -> None:
    assert bounded("x" * 50, 50) == "x" * 50
    cut = bounded("x" * 51, 50)
    assert (len(cut), cut[-21:]) == (50, "x ... (51 characters)")
    assert len(bounded("x" * 10_000_000, 300)) == 300


@pytest.mark.parametrize(
    "name", ["", "learner", "a b", "a|b", "a:b", "a,b", "{a", "a}", "a\nb", "a\tb", "a\0b", "x" * 257]
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(PayloadError, match="member_id"):
        check_id("member_id", name)


@pytest.mark.parametrize(
    "name", ["", "train", "train-", "train-1:0", "train-1 ", "train-1\n", "train--1", "test-1", "train-¹", "train-1|2"]
)
def test_only_tables_have_groups(name: str) -> None:
    with pytest.raises(PayloadError, match="group_id"):
        check_group_id("group_id", name)
    check_group_id("group_id", "train-12345678901234")


def test_a_task_that_no_grant_could_carry_is_refused() -> None:
    task = make_task(1)
    task.ground_truth_json = "x" * MAX_TASK_BYTES
    with pytest.raises(PayloadError, match=r"tasks\[0\]: \d+ bytes, a prompt task may have"):
        check_tasks([task], [0], 1 << 30)


async def refused(call: Any) -> PayloadError:
    """The refusal of a call: as it is, without the client's help."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    error = to_rollmesh_error(failure.value, "calling")
    assert isinstance(error, PayloadError), error
    return error


async def wrote(generator: Generator, request: pb.WriteRequest) -> pb.WriteResponse:
    call = generator.client._stub.Write(timeout=TIMEOUT_S)
    await call.write(request)
    response: pb.WriteResponse = await call.read()
    call.cancel()
    return response


async def test_long_reasons_cost_nothing_and_their_group_trains(mesh: Mesh) -> None:
    """Stored whole, they would be one message with the group, which no learner could take."""
    front = await mesh.front(network={"max_message_mb": 4})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.client.seed("train", 1, [make_task(1, n=6)])
    admission, writer = generator.admission(), generator.writer()
    admission.update(1, V0)
    (grant,) = await generator.grants(admission, 1)
    for member in range(6):
        write = make_write(grant, member, [V0] * 5) if member < 2 else make_failure(grant, member)
        if member >= 2:
            write.head.meta.reason = f"{member}" * (1 << 20)
        (result,) = await writer.write([write])
        assert result.status == pb.WRITE_STATUS_STORED
    (group,) = await learner.batch(learner.sampler(), 1, 0)
    assert [len(member.reason) for member in group.members] == [0, 0] + [REASON_CHARACTERS] * 4
    assert group.members[2].reason.endswith(f" ... ({1 << 20} characters)")
    assert (await learner.train([group], 0)).claimed


async def test_metadata_over_its_limit_is_rejected_by_name(mesh: Mesh) -> None:
    _, _, generator, _, (grant,) = await mesh.granted()
    writer = generator.writer()
    large, infinite, sound = (make_write(grant, member, [V0] * 3) for member in (0, 0, 0))
    large.head.meta.components.update({f"component-{i}": 1.0 for i in range(META_BYTES // 20)})
    infinite.head.meta.metrics["turns"] = float("inf")
    results = await writer.write([large, infinite, sound])
    assert [(r.status, r.field) for r in results] == [
        (pb.WRITE_STATUS_REJECTED, "meta"),
        (pb.WRITE_STATUS_REJECTED, "meta.metrics.turns"),
        (pb.WRITE_STATUS_STORED, ""),
    ]


async def test_a_group_that_no_message_takes_fails_and_the_learner_continues(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    tasks = [make_task(1), make_task(2)]
    tasks[0].ground_truth_json = "x" * (2 << 20)
    await learner.client.seed("train", 1, tasks)
    admission = generator.admission()
    admission.update(2, V0)
    await generator.finish(generator.writer(), await generator.grants(admission, 2), V0)
    # As if it had been configured since.
    await mesh.stop_front(front)
    network = front._config.network.model_copy(update={"max_message_mb": 1})
    small = await mesh.front(front._config.model_copy(update={"network": network}))
    heir = await mesh.learner(small, takeover=True)
    sampler = heir.sampler()
    sampler.request(2, 0)
    (group,) = await heir.collect(sampler, 1)
    assert group.task.ordinal == 2
    counts = await balanced(heir)
    assert (counts.failed, counts.reasons["failed/too_large"]) == (1, 1)


async def test_messages_of_too_many_members_or_bytes_are_refused(mesh: Mesh) -> None:
    _, _, generator, _, (grant,) = await mesh.granted()
    one = make_failure(grant, 0).head
    error = await refused(wrote(generator, pb.WriteRequest(table="train", writes=[one] * (MESSAGE_MEMBERS + 1))))
    assert (error.field, error.hint) == ("writes", "send them in several messages")
    huge = pb.WriteRequest(table="train", writes=[one], payloads=bytes(MESSAGE_PAYLOAD_BYTES + 1))
    assert (await refused(wrote(generator, huge))).field == "payloads"
    at_most = pb.WriteRequest(table="train", writes=[one] * MESSAGE_MEMBERS)
    statuses = list((await wrote(generator, at_most)).statuses)
    assert statuses == [pb.WRITE_STATUS_STORED] + [pb.WRITE_STATUS_DUPLICATE] * (MESSAGE_MEMBERS - 1)


async def test_reasons_of_refused_groups_are_counted_under_few_names(mesh: Mesh) -> None:
    front = await mesh.front(learner={"batch": {"groups": 80}})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 80)
    admission = generator.admission()
    admission.update(80, V0)
    await generator.finish(generator.writer(), await generator.grants(admission, 80), V0)
    groups = await learner.batch(learner.sampler(), 80, 0)
    for index, group in enumerate(groups):
        lease = pb.LeaseRef(group_id=group.group_id, lease_id=group.lease_id)
        await learner.client.nack("train", 1, [lease], pb.NACK_DISPOSITION_FILTER, f"reason {index}")
    counts = await balanced(learner)
    assert counts.filtered == 80
    assert len(counts.reasons) == 65
    assert counts.reasons["filtered/other"] == 16


async def test_what_members_say_of_themselves_is_bounded(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    front = await mesh.front()
    generator = await mesh.generator(front)
    stub = generator.membership

    def joining(**changes: Any) -> Any:
        request = membership_pb2.JoinRequest(
            member_id="g", role=membership_pb2.ROLE_GENERATOR, protocol=PROTOCOL, **changes
        )
        return stub.Join(request, timeout=TIMEOUT_S)

    for field in ("address", "host_id"):
        assert (await refused(joining(**{field: "x" * 257}))).field == field
        assert (await refused(joining(**{field: "\x1b[2J"}))).field == field, "a terminal would obey"
    generation = (await joining()).generation

    def beating(**changes: Any) -> Any:
        request = membership_pb2.HeartbeatRequest(member_id="g", generation=generation, **changes)
        return stub.Heartbeat(request, timeout=TIMEOUT_S)

    assert (await refused(beating(endpoint="x" * 257))).field == "endpoint"
    assert (await refused(beating(waiting_reason="x" * (WAITING_CHARACTERS + 1)))).field == "waiting_reason"
    assert (await refused(beating(waiting_reason="\x1b]0;title\x07"))).field == "waiting_reason"
    assert (await refused(beating(gauges={f"g{i}": 1.0 for i in range(65)}))).field == "gauges"
    assert (await refused(beating(gauges={"g" * 65: 1.0}))).field == "gauges"
    for gauge in (float("nan"), float("inf"), -float("inf")):
        assert (await refused(beating(gauges={"tokens_generated": gauge}))).field == "gauges.tokens_generated"
    # Members themselves never say so much.
    generator.agent.set_status(wait=Wait("\x1b[31m" + "x" * 100_000), gauges={"loss": 1.0})
    await generator.agent.heartbeat()
    generator.agent.set_status(gauges={"loss": float("nan")})
    await generator.agent.heartbeat()
    me = generator.agent.member_id
    (member,) = [member for member in await generator.agent.members() if member.member_id == me]
    assert "loss" not in member.gauges, "neither what is no number, nor what was before"

    monkeypatch.setattr("rollmesh.buffer.server.membership.MAX_RUN_MEMBERS", 5)
    monkeypatch.setattr("rollmesh.buffer.server.membership.RESERVED_MEMBERS", 1)
    await mesh.generator(front)  # the front, two generators, and "g"

    def another(role: str) -> Any:
        request = membership_pb2.JoinRequest(
            member_id=f"another-{role}", role=membership_pb2.Role.Value(role), protocol=PROTOCOL
        )
        return stub.Join(request, timeout=TIMEOUT_S)

    with pytest.raises(grpc.aio.AioRpcError, match="has 4 members, and takes no more of ROLE_GENERATOR"):
        await another("ROLE_GENERATOR")
    assert (await joining()).generation > generation, "who is in may come again"
    await another("ROLE_REWARD")
    with pytest.raises(grpc.aio.AioRpcError, match="has 5 members, and takes no more of ROLE_MODEL"):
        await another("ROLE_MODEL")
    await another("ROLE_LEARNER")


async def test_joining_costs_the_same_however_many_have_joined(mesh: Mesh) -> None:
    config = (left := await mesh.front())._config
    right = await mesh.front(config)
    generator = await mesh.generator(left)
    redis, keys = left.access.client, Keys(left.run_name)
    await redis.hset(keys.members, mapping={f"g{i}": b"no description of ours" for i in range(10)})
    request = membership_pb2.JoinRequest(member_id="g", role=membership_pb2.ROLE_GENERATOR, protocol=PROTOCOL)
    response = await generator.membership.Join(request, timeout=TIMEOUT_S)
    assert set(response.fronts) == {left.address, right.address}
    await redis.hdel(keys.members, *(f"g{i}" for i in range(10)))


async def test_a_stream_of_the_name_learner_is_no_ones(mesh: Mesh) -> None:
    """As a holder it would be the learner's: it would be offered what that has leased."""
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    admission = generator.client.admit("train", "learner", lambda: learner.incarnation)
    generator.streams.append(admission)
    admission.update(1, V0)
    with pytest.raises(RollmeshError, match="not a name"):
        async with asyncio.timeout(TIMEOUT_S):
            await anext(admission)
