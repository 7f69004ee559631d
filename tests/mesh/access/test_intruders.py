"""Each verb of the protos, tried by everyone who must not call it and by all who may."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rollmesh.mesh.access.permissions import VERBS, check_role, contract_of
from rollmesh.mesh.access.roles import Identity, Role, new_identity
from rollmesh.mesh.access.secret import parse_secret
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import PermissionDeniedError
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.service import add_health_and_reflection
from tests.mesh.access.verbs import Verb, all_verbs, attempts
from tests.secrets_here import TOKEN, write_secret


class Everything(grpc.GenericRpcHandler):
    """Serves every verb, and counts who came through."""

    def __init__(self) -> None:
        self.served = Counter[str]()
        self._verbs = {verb.path: verb for verb in all_verbs()}

    def service(self, details: Any) -> Any:
        verb = self._verbs.get(details.method)
        return None if verb is None else self._handler(verb)

    def _handler(self, verb: Verb) -> Any:
        async def single(request: Any, _context: Any) -> Any:
            await self._read(verb, request)
            return verb.response()

        async def stream(request: Any, _context: Any) -> AsyncIterator[Any]:
            await self._read(verb, request)
            yield verb.response()

        kind = f"{'stream' if verb.streams_in else 'unary'}_{'stream' if verb.streams_out else 'unary'}"
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            stream if verb.streams_out else single, verb.request.FromString, verb.response.SerializeToString
        )

    async def _read(self, verb: Verb, request: Any) -> None:
        if verb.streams_in:
            async for _ in request:
                pass
        self.served[verb.path] += 1


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Everything, grpc.aio.Channel]]:
    security = SecuritySection(token_file=write_secret(tmp_path / "token"))
    server, everything = new_server(security), Everything()
    server.add_generic_rpc_handlers((everything,))
    add_health_and_reflection(server, [])
    port = bind(server, "127.0.0.1", 0, security)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield everything, channel
    await server.stop(None)


def test_the_table_names_every_verb() -> None:
    assert set(VERBS) == {verb.path for verb in all_verbs()}


async def test_no_intruder_gets_in(served: tuple[Everything, grpc.aio.Channel]) -> None:
    everything, channel = served
    tried = attempts(TOKEN)
    wrong = [
        (attempt.verb.path, attempt.what, status)
        for attempt in tried
        if (status := await attempt.verb.call(channel, attempt.claim, attempt.request)) is not attempt.refused_as
    ]
    assert not wrong
    assert not everything.served
    assert len(tried) > 14 * len(VERBS)


def test_who_is_refused_is_told_who_may_call() -> None:
    with pytest.raises(PermissionDeniedError) as refused:
        check_role(Identity(Role.GENERATOR), "/rollmesh.v1.Buffer/Ledger")
    assert refused.value.hint.startswith("learner, observer, operator may: rollmesh token grant ")
    with pytest.raises(PermissionDeniedError) as refused:
        check_role(Identity(Role.OPERATOR), "/rollmesh.v1.Buffer/Other")
    assert not refused.value.hint


async def test_who_may_call_gets_in(served: tuple[Everything, grpc.aio.Channel]) -> None:
    everything, channel = served
    expected = Counter[str]()
    for verb in all_verbs():
        for role in VERBS[verb.path]:
            me = new_identity(role)
            claim = parse_secret(TOKEN, "").credentials(me).claim(contract_of(verb.path))
            assert await verb.call(channel, claim, verb.asked_by(me.member_id, role)) is grpc.StatusCode.OK
            expected[verb.path] += 1
    assert everything.served == expected


async def test_of_who_is_refused_no_message_is_read(tmp_path: Path) -> None:
    security = SecuritySection(token_file=write_secret(tmp_path / "token"))
    server, read = new_server(security), list[bytes]()
    kinds = [grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler]
    handlers = {str(number): make(None, read.append) for number, make in enumerate(kinds)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("rollmesh.v1.Reward", handlers),))
    port = bind(server, "127.0.0.1", 0, security)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for call in (
            channel.unary_unary("/rollmesh.v1.Reward/0")(bytes(1 << 20), timeout=120),
            channel.unary_stream("/rollmesh.v1.Reward/1")(bytes(1 << 20), timeout=120).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await server.stop(None)
    assert not read


async def test_health_answers_everyone_and_is_watched_by_every_role(
    served: tuple[Everything, grpc.aio.Channel],
) -> None:
    _, channel = served
    health, asked = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
    # A stranger is told of the whole, whatever it asks for: what it sends is not read.
    unknown = health_pb2.HealthCheckRequest(service="of a million names one that is not served")
    for request in (asked, unknown):
        assert (await health.Check(request, timeout=180)).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await health.Check(unknown, timeout=60, metadata=_observer("grpc.health.v1.Health"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await health.Watch(asked, timeout=180).read()
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    watch = health.Watch(asked, timeout=60, metadata=_observer("grpc.health.v1.Health"))
    assert (await watch.read()).status
    watch.cancel()


async def test_reflection_answers_every_role(served: tuple[Everything, grpc.aio.Channel]) -> None:
    _, channel = served
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    verb = Verb(path, type(asked), reflection_pb2.ServerReflectionResponse, streams_in=True, streams_out=True)
    assert await verb.call(channel, None, asked) is grpc.StatusCode.UNAUTHENTICATED
    metadata = _observer("grpc.reflection.v1alpha.ServerReflection")
    answer = await reflection.ServerReflectionInfo(iter([asked]), timeout=60, metadata=metadata).read()
    assert answer.list_services_response.service


def _observer(contract: str) -> tuple[tuple[str, str]]:
    claim = parse_secret(TOKEN, "").credentials(Identity(Role.OBSERVER)).claim(contract)
    return (("authorization", f"Bearer {claim}"),)
