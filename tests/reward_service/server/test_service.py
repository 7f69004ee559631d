"""The service as a process, its membership in the mesh, and scorers built from a configuration."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from rollmesh.mesh.config.load import load_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError, PortInUseError, RewardError
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.runtime.service import Shutdown
from rollmesh.protos import membership_pb2, membership_pb2_grpc
from rollmesh.reward_service.client.client import CallLimits, LocalScorer, RewardClient, build_scorer, needs_discovery
from rollmesh.reward_service.routing import split_routes
from rollmesh.reward_service.server.service import serve as serve_process
from tests.joining import NOWHERE, when_it_waits
from tests.repository import REPOSITORY


def config(**reward: Any) -> Config:
    return load_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "reward": reward})


class Mesh(membership_pb2_grpc.MembershipServicer):
    """A mesh of one: remembers who joined and left."""

    def __init__(self) -> None:
        self.members: dict[str, membership_pb2.Member] = {}
        self.joined = asyncio.Event()
        self.reported = asyncio.Event()
        self.trouble: asyncio.Queue[str] = asyncio.Queue()
        self.left: list[str] = []
        self.finished = False

    async def Join(self, request: Any, context: Any) -> membership_pb2.JoinResponse:
        self.members[request.member_id] = membership_pb2.Member(
            member_id=request.member_id, role=request.role, address=request.address, host_id=request.host_id
        )
        self.joined.set()
        return membership_pb2.JoinResponse(generation=1, heartbeat_interval_ms=50, member_ttl_ms=1000, run_name="r")

    async def Heartbeat(self, request: Any, context: Any) -> membership_pb2.HeartbeatResponse:
        if request.gauges.get("reward_items"):
            self.reported.set()
        for name, value in request.gauges.items():
            self.members[request.member_id].gauges[name] = value
        if request.waiting_reason:
            self.trouble.put_nowait(request.waiting_reason)
        return membership_pb2.HeartbeatResponse(known=True, run_finished=self.finished)

    async def Leave(self, request: Any, context: Any) -> membership_pb2.LeaveResponse:
        self.left.append(request.member_id)
        return membership_pb2.LeaveResponse()

    async def List(self, request: Any, context: Any) -> membership_pb2.ListResponse:
        found = [m for m in self.members.values() if request.role in (0, m.role)]
        return membership_pb2.ListResponse(members=found)


@pytest_asyncio.fixture
async def mesh() -> AsyncIterator[tuple[Mesh, str]]:
    servicer, server = Mesh(), grpc.aio.server()
    membership_pb2_grpc.add_MembershipServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(0)


def start(tmp_path: Path, **reward: Any) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Runs the service as the command line does; returns the process and the ready file's content."""
    ready = tmp_path / "ready.json"
    code = (
        "import sys, json; from pathlib import Path; from rollmesh.mesh.config.load import load_config; "
        "from rollmesh.reward_service.server import service; c = load_config(json.loads(sys.argv[1])); "
        "sys.exit(service.run(c, host='127.0.0.1', port=0, mesh=None, ready_file=Path(sys.argv[2])))"
    )
    values = json.dumps({"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "reward": reward})
    process = subprocess.Popen(
        [sys.executable, "-c", code, values, str(ready)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    messages = []
    for line in process.stderr:  # ends with the process, or as soon as the service says that it serves
        messages.append(json.loads(line)["message"])
        if "serving" in messages[-1]:
            break
    metrics = next(message.split()[-1] for message in messages if "metrics at" in message)
    return process, {**json.loads(ready.read_text()), "metrics": metrics}


async def test_process_serves_counts_and_ends_on_sigterm(tmp_path: Path, make_item: Any) -> None:
    (tmp_path / "mine.py").write_text("def score(solution_str, ground_truth): return 3.0\n")
    process, said = await asyncio.to_thread(start, tmp_path, functions=["mine.py:score"])
    try:
        assert said["pid"] == process.pid
        client = RewardClient([said["address"]])
        (result,) = await client.score([make_item()], timeout_s=5)
        assert result.scored.total == 3.0
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(said["metrics"], timeout=5).read().decode())
        assert 'rollmesh_reward_items_total{code="",outcome="scored"} 1.0' in page
        await client.close()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10) == 0
    finally:
        process.kill()
        process.wait(60)
        process.stderr.close()


async def test_process_killed_in_the_middle_of_a_call(tmp_path: Path, scripted: Any, make_item: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "import asyncio, pathlib\n"
        "async def score(solution_str, ground_truth):\n"
        "    pathlib.Path('called').write_text('now')\n"
        "    await asyncio.sleep(60)\n"
    )
    os.mkfifo(tmp_path / "called")
    process, said = await asyncio.to_thread(start, tmp_path, functions=["mine.py:score"])
    try:
        client = RewardClient([said["address"]])
        scoring = asyncio.create_task(client.score([make_item()], timeout_s=30))
        await asyncio.to_thread((tmp_path / "called").read_text)  # opens once the scorer has opened it
        client.set_endpoints([said["address"], (await scripted()).address])
        process.kill()
        assert (await scoring)[0].scored.total == 1.0
        await client.close()
    finally:
        process.kill()
        process.wait(60)
        process.stderr.close()


async def test_joins_the_mesh_reports_and_leaves(mesh: tuple[Mesh, str], make_item: Any, tmp_path: Path) -> None:
    servicer, address = mesh
    shutdown = Shutdown()
    running = asyncio.create_task(
        serve_process(config(), shutdown, host="127.0.0.1", port=0, mesh=address, ready_file=tmp_path / "ready")
    )
    await asyncio.wait_for(servicer.joined.wait(), 180)
    (member,) = servicer.members.values()
    assert member.role == membership_pb2.ROLE_REWARD
    assert member.host_id == host_id()

    # A generator finds it through the mesh alone.
    client = build_scorer(config())
    async with open_channel(address, config().security) as channel:
        agent = MembershipAgent(
            channel, membership_pb2.ROLE_GENERATOR, member_id="gen", address="", host_id="h", retry_s=30
        )
        await agent.start()
        client.set_endpoints([m.address for m in await agent.members(membership_pb2.ROLE_REWARD)])
        (result,) = await client.score([make_item()], timeout_s=30)
        assert result.scored.total == 1.0
        await agent.leave()
    await client.close()

    await asyncio.wait_for(servicer.reported.wait(), 180)
    servicer.finished = True
    assert await asyncio.wait_for(running, 180) == 0
    assert member.member_id in servicer.left


async def test_it_can_be_ended_while_it_waits_for_the_mesh() -> None:
    shutdown = Shutdown()
    with when_it_waits(lambda: shutdown.request("enough")) as said:
        status = await serve_process(config(), shutdown, host="127.0.0.1", port=0, mesh=NOWHERE, ready_file=None)
    assert status == 0
    assert said[0].startswith(f"waits for the mesh at {NOWHERE}, ")


async def test_heartbeats_say_that_workers_die_one_after_another(
    mesh: tuple[Mesh, str], make_item: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("import os\ndef score(solution_str, ground_truth): os._exit(7)\n")
    servicer, address = mesh
    shutdown = Shutdown()
    dying = config(functions=[f"{tmp_path / 'mine.py'}:score"], workers=1)
    running = asyncio.create_task(
        serve_process(dying, shutdown, host="127.0.0.1", port=0, mesh=address, ready_file=None)
    )
    await asyncio.wait_for(servicer.joined.wait(), 240)
    (member,) = servicer.members.values()
    client = RewardClient([member.address], limits=CallLimits(attempts=1))
    scoring = asyncio.create_task(client.score([make_item(str(n)) for n in range(40)], timeout_s=60))
    # Where workers start slowly, heartbeats first say that calls wait for one.
    async with asyncio.timeout(240):
        while "reward workers ended one after another, at last: exit code 7" not in await servicer.trouble.get():
            pass
    await client.close()
    await scoring
    shutdown.request("enough")
    assert await asyncio.wait_for(running, 240) == 0


async def test_a_port_that_is_taken_and_a_function_that_is_not_there(serve: Any) -> None:
    port = int((await serve()).rpartition(":")[2])
    options: dict[str, Any] = {"host": "127.0.0.1", "mesh": None, "ready_file": None}
    with pytest.raises(PortInUseError, match=str(port)):
        await serve_process(config(), Shutdown(), port=port, **options)
    with pytest.raises(RewardError, match="did you mean 'gsm8k'"):
        await serve_process(config(functions=["gsm8"]), Shutdown(), port=0, **options)
    keyless = config(functions=["gsm8"]).model_copy(update={"security": SecuritySection(metrics_key_file=Path("none"))})
    with pytest.raises(ConfigError, match=r"security\.metrics_key_file none"):
        await serve_process(keyless, Shutdown(), port=0, **options)


async def test_scorers_from_configurations(scripted: Any, make_item: Any) -> None:
    local = build_scorer(config(in_process=True, functions=["exact_match"]))
    assert isinstance(local, LocalScorer)
    assert (await local.score([make_item()]))[0].scored.total == 1.0
    await local.close()

    server = await scripted()
    mixed = build_scorer(config(in_process=True, by_data_source={"far": [server.address], "w": ["strings"]}))
    items = [make_item("n"), make_item("f", "x", data_source="far"), make_item("w", "'42'", data_source="w")]
    assert [result.scored.total for result in await mixed.score(items)] == [1.0, 1.0, 1.0]
    assert len(server.requests) == 1
    await mixed.close()

    remote = build_scorer(config(endpoints=[server.address]))
    assert (await remote.score([make_item()]))[0].scored.total == 1.0
    await remote.close()

    assert needs_discovery(config())
    assert not needs_discovery(config(endpoints=[server.address]))
    assert not needs_discovery(config(in_process=True))


@pytest.mark.parametrize(
    "reward",
    [
        {"endpoints": ["grpc://nowhere"]},
        {"by_data_source": {"a": ["strings", "grpc://h:1"]}},
        {"by_data_source": {"a": []}},
    ],
)
async def test_routes_and_addresses_that_make_no_sense(reward: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        build_scorer(config(**reward))


def test_routes() -> None:
    functions, endpoints = split_routes({"a": ["strings", "gsm8k"], "b": ["grpc://h:1", "grpcs://h:2"]})
    assert functions == {"a": ("strings", "gsm8k")}
    assert endpoints == {"b": ("grpc://h:1", "grpcs://h:2")}
