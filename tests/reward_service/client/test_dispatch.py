"""Few, well-filled calls; whole groups; load shared by what is outstanding."""

import asyncio
from typing import Any

import pytest

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.client import RewardClient
from rollmesh.reward_service.client.endpoint import RewardEndpoint, connector
from rollmesh.reward_service.client.endpoint_circuit import EndpointCircuit


async def test_callers_of_one_moment_share_a_request(scripted: Any, make_item: Any) -> None:
    server = await scripted()
    client = RewardClient([server.address])
    calls = [client.score([make_item(f"{n}", group_id=f"g{n}")], timeout_s=30) for n in range(50)]
    results = await asyncio.gather(*calls)
    assert all(result[0].HasField("scored") for result in results)
    assert [len(request.items) for request in server.requests] == [50]
    await client.close()


async def test_items_pile_up_while_calls_are_in_flight(
    scripted: Any, make_item: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.reward_service.client.endpoint._SPACING_S", 60.0)
    release = asyncio.Event()

    async def held(request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        await release.wait()
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            response.results.add(item_id=item.item_id).scored.total = 1.0
        return response

    server = await scripted(held)
    client = RewardClient([server.address])
    scoring = []
    for n in range(40):
        scoring.append(asyncio.create_task(client.score([make_item(f"{n}", group_id=f"g{n}")], timeout_s=30)))
        await asyncio.sleep(0)
    await asyncio.wait_for(server.called.wait(), 180)
    release.set()
    assert all(result[0].HasField("scored") for result in await asyncio.gather(*scoring))
    assert len(server.requests) <= 3, "two are free to go at once"
    await client.close()


async def test_groups_stay_whole_up_to_the_servers_limit(scripted: Any, make_item: Any) -> None:
    server = await scripted(max_items=10)
    client = RewardClient([server.address])
    items = [make_item(f"{n}", group_id=f"g{n % 5}") for n in range(20)]  # members of the groups interleaved
    items += [make_item(f"big{n}", group_id="big") for n in range(25)]
    results = await client.score(items, timeout_s=30)
    assert [result.item_id for result in results] == [item.item_id for item in items]
    assert all(len(request.items) <= 10 for request in server.requests)
    parts: dict[str, int] = {}
    for request in server.requests:
        for group in {item.group_id for item in request.items}:
            parts[group] = parts.get(group, 0) + 1
    assert {group: parts[group] for group in ("g0", "g1", "g2", "g3", "g4")} == dict.fromkeys(
        ("g0", "g1", "g2", "g3", "g4"), 1
    )
    assert parts["big"] >= 3
    await client.close()


async def test_load_goes_where_least_is_outstanding(scripted: Any, introduced: Any, make_item: Any) -> None:
    release, busy = asyncio.Event(), asyncio.Event()

    async def one_is_slow(request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        if request.items[0].item_id == "held":
            busy.set()
            await release.wait()
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            response.results.add(item_id=item.item_id).scored.total = 1.0
        return response

    servers = [await scripted(one_is_slow), await scripted(one_is_slow)]
    client = await introduced(servers)
    held = asyncio.create_task(client.score([make_item("held")], timeout_s=30))
    await asyncio.wait_for(busy.wait(), 180)
    before = [len(server.requests) for server in servers]
    for n in range(10):
        assert (await client.score([make_item(f"{n}")], timeout_s=30))[0].HasField("scored")
    assert sorted(len(server.requests) - count for server, count in zip(servers, before, strict=True)) == [0, 10]
    release.set()
    assert (await held)[0].HasField("scored")
    await client.close()


async def test_idle_endpoints_take_turns(scripted: Any, introduced: Any, make_item: Any) -> None:
    servers = [await scripted(), await scripted()]
    client = await introduced(servers)
    before = [len(server.requests) for server in servers]
    for n in range(10):
        await client.score([make_item(f"{n}")], timeout_s=30)
    assert [len(server.requests) - count for server, count in zip(servers, before, strict=True)] == [5, 5]
    await client.close()


async def test_a_slow_endpoint_is_given_more_calls_spaced_out() -> None:
    endpoint = RewardEndpoint("grpc://127.0.0.1:1", connector(SecuritySection()))
    endpoint.described = True
    for _ in range(2):
        assert endpoint.ready_at(100.0) == 100.0
        endpoint.begin(1, 100.0)
    assert 100.0 < endpoint.ready_at(100.0) <= 100.05
    assert endpoint.ready_at(101.0) == 101.0
    for n in range(30):
        endpoint.begin(1, 101.0 + n)
    assert endpoint.ready_at(200.0) == float("inf")
    await endpoint.close()


def test_circuit_opens_backs_off_and_closes() -> None:
    circuit = EndpointCircuit(threshold=2)
    circuit.record_failure(10.0, "slow")
    assert circuit.closed
    circuit.record_failure(10.0, "slow")
    assert not circuit.closed
    first = circuit.ready_at() - 10.0
    circuit.record_failure(20.0, "slow")
    assert circuit.ready_at() - 20.0 == 2 * first
    for _ in range(100):
        circuit.record_failure(30.0, "slow")
    assert 30.0 < circuit.ready_at() <= 40.0
    circuit.record_success()
    assert circuit.closed
    assert circuit.ready_at() == 0.0
    circuit.record_failure(50.0, "refused", fatal=True)
    assert not circuit.closed
