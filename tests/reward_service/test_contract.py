"""One contract for all ways of scoring: in process, our server (gRPC, HTTP), the third-party one of `examples/`."""

import asyncio
import json
import math
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rollmesh.mesh.access.credentials import SharedKey
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.reward import EndpointTls
from rollmesh.mesh.errors import ConfigError, PayloadError
from rollmesh.protos import reward_pb2, reward_pb2_grpc
from rollmesh.reward_service.client.client import CallLimits, LocalScorer, RewardClient, RewardScorer
from rollmesh.reward_service.client.endpoint import connector, mesh_connector
from rollmesh.reward_service.scoring.engine import ScoringEngine
from rollmesh.reward_service.server.server import RewardServer
from tests.certificates import Authority
from tests.secrets_here import write_secret


@pytest_asyncio.fixture(params=["local", "remote", "http", "third_party"])
async def scorer(request: pytest.FixtureRequest, serve: Any, serve_http: Any) -> AsyncIterator[RewardScorer]:
    made: RewardScorer
    if request.param == "local":
        made = LocalScorer(ScoringEngine(["exact_match"]))
    elif request.param == "remote":
        made = RewardClient([await serve("exact_match")])
    elif request.param == "http":
        made = RewardClient([await serve_http("exact_match")])
    else:
        made = RewardClient([request.getfixturevalue("third_party_server")])
    yield made
    await made.close()


async def test_one_result_per_item_in_order(scorer: RewardScorer, make_item: Any) -> None:
    items = [make_item(f"i{n}", "42" if n % 3 else "41", group_id=f"g{n // 8}") for n in range(300)]
    results = await scorer.score(items, timeout_s=30)
    assert [result.item_id for result in results] == [item.item_id for item in items]
    assert all(result.HasField("scored") for result in results)
    for n, result in enumerate(results):
        assert math.floor(result.scored.total) == (1 if n % 3 else 0)
        assert all(map(math.isfinite, result.scored.components.values()))


async def test_no_truth_is_unscorable(scorer: RewardScorer, make_item: Any) -> None:
    (result,) = await scorer.score([make_item(ground_truth_json="")])
    assert "ground truth" in result.unscorable.reason


async def test_a_bad_item_is_an_error_and_fails_alone(scorer: RewardScorer, make_item: Any) -> None:
    bad, good = await scorer.score([make_item("bad", ground_truth_json="{"), make_item("good")])
    assert bad.error.code in ("bad_input", "exception")
    assert bad.error.message
    assert good.HasField("scored")


async def test_texts_survive(scorer: RewardScorer, make_item: Any) -> None:
    texts = ["naïve 数学 🧮 \u0000", "", "x" * 200_000]
    items = [make_item(f"✓{n}", text, text or "x", response_ids=[]) for n, text in enumerate(texts)]
    results = await scorer.score(items)
    assert [math.floor(result.scored.total) for result in results] == [1, 0, 1], "an empty response is a wrong one"


async def test_nothing_in_nothing_out(scorer: RewardScorer) -> None:
    assert await scorer.score([]) == []


async def test_repeated_ids_are_refused(scorer: RewardScorer, make_item: Any) -> None:
    with pytest.raises(PayloadError, match="item_id"):
        await scorer.score([make_item("a"), make_item("a")])


async def test_callers_at_once_each_get_their_own(scorer: RewardScorer, make_item: Any) -> None:
    async def one(caller: int) -> bool:
        # The same ids in every call: they must not be mixed up.
        items = [make_item(f"{n}", str(caller), str(caller if n else "other")) for n in range(4)]
        totals = [math.floor(result.scored.total) for result in await scorer.score(items, timeout_s=30)]
        return totals == [0, 1, 1, 1]

    assert all(await asyncio.gather(*(one(caller) for caller in range(20))))


async def test_health_and_reflection(serve: Any) -> None:
    address = await serve()
    async with grpc.aio.insecure_channel(address.removeprefix("grpc://")) as channel:
        for name in ("", "rollmesh.v1.Reward"):
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=name), timeout=5
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        stream = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=180
        )
        names = [s.name async for reply in stream for s in reply.list_services_response.service]
        assert "rollmesh.v1.Reward" in names


async def test_the_server_answers_before_the_callers_deadline(serve: Any, make_item: Any) -> None:
    async def slow(solution_str: str, ground_truth: str) -> float:
        await asyncio.sleep(0 if solution_str == "quick" else 30)
        return 1.0

    address = await serve(slow, call_timeout_s=20.0, timeout_s=20.0)
    async with grpc.aio.insecure_channel(address.removeprefix("grpc://")) as channel:
        request = reward_pb2.ScoreRequest(items=[make_item("a", "quick"), make_item("b", "slow")])
        answer = await reward_pb2_grpc.RewardStub(channel).Score(request, timeout=2.0)
    assert answer.results[0].scored.total == 1.0
    assert answer.results[1].error.code == "timeout"
    assert answer.results[1].error.retryable


async def test_the_server_refuses_repeated_ids_naming_the_field(serve: Any, make_item: Any) -> None:
    address = await serve()
    async with grpc.aio.insecure_channel(address.removeprefix("grpc://")) as channel:
        request = reward_pb2.ScoreRequest(items=[make_item("a"), make_item("a")])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reward_pb2_grpc.RewardStub(channel).Score(request, timeout=180)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "item_id" in (caught.value.details() or "")


def test_the_third_partys_environment_knows_nothing_of_ours(foreign_python: Any) -> None:
    code = (
        "import importlib.util as u, json; print(json.dumps([bool(u.find_spec(n)) for n in ('grpc', 'mesh', 'torch')]))"
    )
    out = subprocess.run([foreign_python, "-I", "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert json.loads(out.stdout) == [True, False, False]


async def test_tls(tmp_path: Path, make_item: Any) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.certify("service")
    server = RewardServer(ScoringEngine(["exact_match"]), security=SecuritySection(tls_key=key, tls_cert=certificate))
    address = f"grpcs://localhost:{await server.start('localhost')}"
    trusting = RewardClient([address], connect=connector(SecuritySection(tls_ca=authority.pem)))
    assert (await trusting.score([make_item()], timeout_s=30))[0].scored.total == 1.0
    await trusting.close()
    doubting = RewardClient([address])  # trusts the public authorities alone
    assert (await doubting.score([make_item()], timeout_s=0.5))[0].error.code == "unreachable"
    await doubting.close()
    await server.stop(0)


async def test_an_endpoint_may_ask_for_a_certificate_of_its_own_authority(tmp_path: Path, make_item: Any) -> None:
    authority, stranger = Authority(tmp_path, "judges"), Authority(tmp_path, "strangers")
    certificate, key = authority.certify("service")
    server = RewardServer(
        ScoringEngine(["exact_match"]),
        security=SecuritySection(tls_key=key, tls_cert=certificate, tls_client_ca=authority.pem),
    )
    address = f"grpcs://localhost:{await server.start('localhost')}"
    cert, cert_key = authority.certify("generator")
    mesh = SecuritySection(tls_ca=stranger.pem)
    for tls, right in (
        ({"ca": authority.pem, "cert": cert, "key": cert_key}, True),
        ({"ca": authority.pem}, False),
        ({"cert": cert, "key": cert_key}, False),
    ):
        client = RewardClient([address], connect=connector(mesh, tls={address: EndpointTls(**tls)}))
        (result,) = await client.score([make_item()], timeout_s=60 if right else 0.5)
        assert (result.scored.total == 1.0) is right
        await client.close()
    with pytest.raises(ConfigError, match=r"reward\.tls\.grpcs://localhost:\d+\.ca "):
        connector(mesh, tls={address: EndpointTls(ca=cert_key)})(address)
    with pytest.raises(ValueError, match="belong together"):
        EndpointTls(cert=cert)
    await server.stop(0)


async def test_the_meshs_token_goes_to_members_alone(tmp_path: Path, make_item: Any) -> None:
    security = SecuritySection(token_file=write_secret(tmp_path / "token"))
    server = RewardServer(ScoringEngine(["exact_match"]), security=security)
    address = f"grpc://127.0.0.1:{await server.start()}"
    member = RewardClient([address], connect=mesh_connector(security))
    assert (await member.score([make_item()], timeout_s=30))[0].scored.total == 1.0
    await member.close()
    foreign = RewardClient([address], connect=connector(security), limits=CallLimits(attempts=1))
    (refused,) = await foreign.score([make_item()], timeout_s=30)
    assert "must join the mesh" in refused.error.message
    await foreign.close()
    await server.stop(0)


async def test_an_endpoint_outside_the_mesh_gets_its_own_key_alone(tmp_path: Path, make_item: Any) -> None:
    server = RewardServer(ScoringEngine(["exact_match"]), key=SharedKey("its key"))
    address = f"grpc://127.0.0.1:{await server.start()}"
    for key, right in (("its key", True), ("another", False), (None, False)):
        keys = {address: write_secret(tmp_path / "key", key)} if key else {}
        client = RewardClient([address], connect=connector(SecuritySection(), keys), limits=CallLimits(attempts=1))
        (result,) = await client.score([make_item()], timeout_s=30)
        assert (result.scored.total == 1.0) is right
        await client.close()
    await server.stop(0)
