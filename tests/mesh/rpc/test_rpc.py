"""Errors keep their type across the wire; tokens, binds and retries do what they promise."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import (
    ConfigError,
    FencedError,
    PayloadError,
    PortInUseError,
    RollmeshError,
    UnreachableError,
    VersionGoneError,
)
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.errors import is_transient, to_rollmesh_error
from rollmesh.mesh.rpc.retries import call_with_retry
from rollmesh.mesh.rpc.server import MOST_HEADERS, bind, new_server
from rollmesh.mesh.runtime import open_files
from rollmesh.mesh.runtime.service import add_health_and_reflection
from rollmesh.protos import buffer_pb2, buffer_pb2_grpc, reward_pb2, reward_pb2_grpc, weights_pb2, weights_pb2_grpc
from tests.secrets_here import write_secret

OPEN = SecuritySection()


class Failing(reward_pb2_grpc.RewardServicer):
    def __init__(self, error: Exception | None) -> None:
        self.error = error

    async def Info(self, request: Any, context: Any) -> reward_pb2.InfoResponse:
        if self.error:
            raise self.error
        return reward_pb2.InfoResponse(name="ok")


class Watching(weights_pb2_grpc.WeightsServicer):
    async def Watch(self, request: Any, context: Any) -> AsyncIterator[weights_pb2.Manifest]:
        yield weights_pb2.Manifest(run="r")
        raise FencedError("taken over", hint="stop")


async def _serve(error: Exception | None, security: SecuritySection = OPEN) -> tuple[grpc.aio.Server, str]:
    server = new_server(security)
    reward_pb2_grpc.add_RewardServicer_to_server(Failing(error), server)
    weights_pb2_grpc.add_WeightsServicer_to_server(Watching(), server)
    add_health_and_reflection(server, [])
    port = bind(server, "127.0.0.1", 0, security)
    await server.start()
    return server, f"127.0.0.1:{port}"


async def _info(address: str, security: SecuritySection = OPEN) -> reward_pb2.InfoResponse:
    async with open_channel(address, security) as channel:
        stub = reward_pb2_grpc.RewardStub(channel)
        return await stub.Info(reward_pb2.InfoRequest(), timeout=180)


@pytest.mark.parametrize(
    "error",
    [
        PayloadError("writes[0].meta", "no good", hint="mend it"),
        FencedError("x", hint="y"),
        ConfigError("grüße"),
        VersionGoneError("version 1:2"),
    ],
    ids=lambda e: e.code,
)
async def test_a_typed_error_arrives_as_it_was_raised(error: RollmeshError) -> None:
    server, address = await _serve(error)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _info(address)
    assert caught.value.code() is not grpc.StatusCode.INTERNAL
    back = to_rollmesh_error(caught.value, "Info")
    assert type(back) is type(error)
    assert back.message.endswith(error.message)
    assert back.hint == error.hint
    if isinstance(error, PayloadError):
        assert isinstance(back, PayloadError)
        assert back.field == error.field
    await server.stop(0)


async def test_a_typed_error_in_a_stream_arrives_after_its_items() -> None:
    server, address = await _serve(None)
    async with open_channel(address, OPEN) as channel:
        call = weights_pb2_grpc.WeightsStub(channel).Watch(weights_pb2.WatchRequest(), timeout=180)
        assert (await call.read()).run == "r"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert isinstance(to_rollmesh_error(caught.value, "Watch"), FencedError)
    await server.stop(0)


async def test_a_stream_that_cannot_be_opened_leaves_no_task_with_a_token_either(tmp_path: Path) -> None:
    token = write_secret(tmp_path / "token")
    for security in (OPEN, SecuritySection(token_file=token)):
        # No one listens on the discard port.
        async with open_channel("127.0.0.1:9", security) as channel:
            call = buffer_pb2_grpc.BufferStub(channel).Admit()
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
            call.cancel()
            assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_token_is_asked_for_and_sent(tmp_path: Path) -> None:
    security = SecuritySection(token_file=write_secret(tmp_path / "token"))
    server, address = await _serve(None, security)
    assert (await _info(address, security)).name == "ok"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _info(address, OPEN)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "token_file" in to_rollmesh_error(caught.value, "Info").hint
    await server.stop(0)


async def test_a_reachable_bind_needs_protection() -> None:
    server = new_server(OPEN)
    with pytest.raises(ConfigError, match="allow_insecure"):
        bind(server, "0.0.0.0", 0, OPEN)
    assert bind(server, "0.0.0.0", 0, SecuritySection(allow_insecure=True)) > 0


async def test_a_taken_port_is_said() -> None:
    server, address = await _serve(None)
    with pytest.raises(PortInUseError, match=address):
        bind(new_server(OPEN), "127.0.0.1", int(address.split(":")[1]), OPEN)
    await server.stop(0)


async def test_an_absent_service_is_unreachable_within_the_deadline() -> None:
    started = time.monotonic()
    async with open_channel("127.0.0.1:1", OPEN) as channel:
        stub = reward_pb2_grpc.RewardStub(channel)
        with pytest.raises(UnreachableError, match="asking"):
            await call_with_retry(lambda: stub.Info(reward_pb2.InfoRequest(), timeout=0.5), retry_s=1.0, what="asking")
    assert time.monotonic() - started < 200


async def test_a_call_is_repeated_until_the_service_is_back() -> None:
    server, address = await _serve(None)
    port = int(address.split(":")[1])
    async with open_channel(address, OPEN) as channel:
        stub = reward_pb2_grpc.RewardStub(channel)
        await stub.Info(reward_pb2.InfoRequest(), timeout=180)
        await server.stop(0)
        call = asyncio.create_task(
            call_with_retry(lambda: stub.Info(reward_pb2.InfoRequest(), timeout=60), retry_s=30, what="Info")
        )
        again = new_server(OPEN)
        reward_pb2_grpc.add_RewardServicer_to_server(Failing(None), again)
        bind(again, "127.0.0.1", port, OPEN)
        await again.start()
        assert (await asyncio.wait_for(call, 180)).name == "ok"
        await again.stop(0)


class Refusing(buffer_pb2_grpc.BufferServicer):
    async def Write(self, request_iterator: Any, context: Any) -> AsyncIterator[buffer_pb2.WriteResponse]:
        async for _ in request_iterator:
            raise FencedError("taken over")
        yield buffer_pb2.WriteResponse()


async def test_a_stream_that_ends_while_it_is_written_is_fenced_or_may_be_opened_again() -> None:
    """gRPC's client sometimes reports its own failed write instead of the status: no reason to give up."""
    server = new_server(OPEN)
    buffer_pb2_grpc.add_BufferServicer_to_server(Refusing(), server)
    port = bind(server, "127.0.0.1", 0, OPEN)
    await server.start()
    seen: set[type[RollmeshError]] = set()
    async with open_channel(f"127.0.0.1:{port}", OPEN) as channel:
        stub = buffer_pb2_grpc.BufferStub(channel)
        for _ in range(150):
            call = stub.Write()
            try:
                while True:
                    await call.write(buffer_pb2.WriteRequest(payloads=bytes(4096)))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass
            try:
                await call.read()
            except grpc.aio.AioRpcError as error:
                seen.add(type(to_rollmesh_error(error, "writing")))
                assert is_transient(error) or "taken over" in str(error.details())
    await server.stop(0)
    assert seen <= {FencedError, UnreachableError}


@pytest.mark.parametrize(
    "said", [b"", b"PRI * HTTP/2.0\r\n\r\n", b"GET / HTTP/1.1\r\n"], ids=["nothing", "half", "http"]
)
async def test_connections_that_say_nothing_are_closed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.mesh.rpc.server.HANDSHAKE_S", 0.5)
    server, address = await _serve(None)
    host, _, port = address.partition(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(130)]
    for _, writer in opened:
        writer.write(said)
    assert (await _info(address)).name == "ok"
    async with asyncio.timeout(240):
        await asyncio.gather(*(_closed(reader) for reader, _ in opened))
    for _, writer in opened:
        writer.close()
    assert (await _info(address)).name == "ok"
    await server.stop(0)


async def _closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 10):
            pass


async def test_connections_beyond_the_bound_are_closed_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "MOST", open_files.MOST._replace(calls=3))
    server, address = await _serve(None)
    host, _, port = address.partition(":")
    async with open_channel(address, OPEN) as channel, asyncio.timeout(240):
        stub = reward_pb2_grpc.RewardStub(channel)
        await stub.Info(reward_pb2.InfoRequest(), timeout=180)
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
        closing = [asyncio.ensure_future(_closed(reader)) for reader, _ in opened]
        for closed in itertools.islice(asyncio.as_completed(closing), 6):
            await closed
        assert sum(task.done() for task in closing) == 6
        assert (await stub.Info(reward_pb2.InfoRequest(), timeout=180)).name == "ok"
        for _, writer in opened:
            writer.close()
        async with open_channel(address, OPEN) as another:
            call = reward_pb2_grpc.RewardStub(another).Info(reward_pb2.InfoRequest(), wait_for_ready=True, timeout=180)
            assert (await call).name == "ok"
    await server.stop(0)


async def test_headers_over_the_bound_are_always_refused_and_others_never() -> None:
    server, address = await _serve(None)
    async with open_channel(address, OPEN) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for size, expected in ((MOST_HEADERS - 1024, {"OK"}), (MOST_HEADERS, {"RESOURCE_EXHAUSTED"})):
            found = set()
            for _ in range(5):
                call = stub.Check(health_pb2.HealthCheckRequest(), timeout=180, metadata=(("x", "a" * size),))
                found.add((await call.code()).name)
            assert found == expected
    await server.stop(0)


async def test_a_connection_has_so_many_calls_at_once_and_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.mesh.rpc.server.MOST_CALLS", 4)
    server, address = await _serve(None)
    async with open_channel(address, OPEN) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        # The first call waits for the connection, and the server's limit comes with that.
        await health.Check(health_pb2.HealthCheckRequest(), timeout=180)
        watches = [health.Watch(health_pb2.HealthCheckRequest(), timeout=180) for _ in range(5)]
        for watch in watches[:4]:
            await watch.read()
        waiting = asyncio.ensure_future(watches[4].read())
        assert not (await asyncio.wait({waiting}, timeout=0.2))[0]
        watches[0].cancel()
        async with asyncio.timeout(180):
            await waiting
        for watch in watches:
            watch.cancel()
    await server.stop(0)
