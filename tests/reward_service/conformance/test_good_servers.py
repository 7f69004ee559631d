"""Servers that keep the contract have no findings, over gRPC and over HTTP."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from rollmesh.mesh.access.credentials import SharedKey
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.conformance.command import check_with
from rollmesh.reward_service.conformance.opening import open_transport
from rollmesh.reward_service.conformance.probes.order import refuse_unknown
from rollmesh.reward_service.conformance.session import Options
from rollmesh.reward_service.conformance.transport import CallError
from rollmesh.reward_service.member_check import member_transport
from rollmesh.reward_service.scorers.versions import VERSIONS
from rollmesh.reward_service.scoring.engine import ScoringEngine
from rollmesh.reward_service.server.server import RewardServer
from tests.certificates import Authority
from tests.command import Command
from tests.repository import REPOSITORY
from tests.reward_service.conformance.servers import Server, right
from tests.secrets_here import write_secret


async def test_a_good_one(serving: Any, checked: Any) -> None:
    report = await checked(await serving(Server()))
    assert not report.findings
    assert report.outcomes == {"scored": 8, "unscorable": 0, "error": 0}
    assert list(report.figures["items_per_s"]) == ["1", "64", "512"]
    assert not any(probe.startswith("stream") for probe in report.skipped if probe != "stream.slow-item")


async def test_ours(serve: Any, checked: Any) -> None:
    routes = {"cais/mmlu": "choice", "google/IFEval": "ifeval", "json_schema": "json_schema", "regex": "regex"}
    report = await checked(await serve("auto", by_data_source={source: [name] for source, name in routes.items()}))
    assert not report.findings
    assert f"gsm8k {VERSIONS['gsm8k']}, " in report.server, "scorers have versions"
    packs = report.figures["known_answers"]
    assert {"arithmetic", "exact_match", "gsm8k", "math", "math_dapo", "qa", *routes.values()} <= packs.keys()
    assert all(pack["right"] == pack["of"] for pack in packs.values())
    assert not {probe for probe in report.skipped if probe.startswith("stream")} - {"stream.slow-item"}


async def test_ours_over_http(serve_http: Any, checked: Any, caplog: pytest.LogCaptureFixture) -> None:
    report = await checked(await serve_http("auto"), "stream", "answers.samples")
    assert not report.findings
    streams = {probe for probe in report.skipped if probe.startswith("stream")}
    assert streams == {"stream.early", "stream.slow-item", "stream.cancel", "stream.timeout"}
    assert not [record for record in caplog.records if record.levelname == "ERROR"], "callers may go"


class Http(BaseHTTPRequestHandler):
    """The same contract over HTTP."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    status = 0

    def do_GET(self) -> None:
        self._answer(reward_pb2.InfoResponse(name="http", version="1", deterministic=True))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = json_format.Parse(body, reward_pb2.ScoreRequest())
        self._answer(reward_pb2.ScoreResponse(results=map(right, request.items)))

    def _answer(self, message: Any) -> None:
        refused = self.status or (401 if self.headers.get("Authorization") != "Bearer secret" else 0)
        body = b"refused" if refused else json_format.MessageToJson(message, indent=None).encode()
        self.send_response(refused or 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Queueing(ThreadingHTTPServer):
    request_queue_size = 128


@pytest.fixture
def http_server() -> Iterator[str]:
    server = Queueing(("127.0.0.1", 0), Http)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()
    Http.status = 0


async def test_one_over_http(http_server: str, checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.reward_service.conformance.probes.load.MAX_MESSAGE", 4 << 20)
    report = await checked(http_server, key="secret")
    assert not report.findings
    assert report.server == "http 1"
    assert "reach.key" not in report.skipped


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((408, "deadline"), (504, "deadline"), (429, "busy"), (503, "busy"), (413, "exhausted")),
        *((401, "unauthenticated"), (403, "denied"), (404, "unimplemented"), (400, "invalid"), (500, "failed")),
    ],
)
async def test_statuses_of_http(http_server: str, status: int, kind: str) -> None:
    Http.status = status
    transport = open_transport(http_server, key="secret")
    with pytest.raises(CallError) as caught:
        await transport.score(reward_pb2.ScoreRequest(), 60)
    await transport.close()
    assert caught.value.kind == kind


async def test_probes_that_do_not_exist_are_refused() -> None:
    refuse_unknown(["answers.odd", "stream", "restart", "reach.info"])
    with pytest.raises(ConfigError, match="no probe has an id that begins with 'identiti'"):
        await check_with(open_transport("grpc://127.0.0.1:9"), "grpc://127.0.0.1:9", None, Options(only=["identiti"]))


async def test_ours_in_a_mesh(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.certify("service")
    token = write_secret(tmp_path / "token")
    served = SecuritySection(token_file=token, tls_cert=certificate, tls_key=key)
    server = RewardServer(ScoringEngine(["auto"]), security=served)
    address = f"grpc://localhost:{await server.start('localhost')}"
    caller = SecuritySection(token_file=token, tls_ca=authority.pem)
    report = await check_with(member_transport(address, caller), address, None, Options(60.0, only=["reach"]))
    assert not report.findings
    assert "reach.key" not in report.skipped
    without = await check_with(open_transport(address), address, None, Options(0.5, only=["reach"]))
    assert not without.reachable, "TLS on one side"
    await server.stop(0)


async def test_tls_and_keys(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.certify("service")
    served = SecuritySection(tls_cert=certificate, tls_key=key)
    server = RewardServer(ScoringEngine(["auto"]), security=served, key=SharedKey("secret"))
    address = f"grpcs://localhost:{await server.start('localhost')}"
    transport = open_transport(address, key="secret", ca=authority.pem)
    report = await check_with(transport, address, None, Options(60.0, only=["reach"]))
    assert not report.findings
    assert "reach.key" not in report.skipped
    await server.stop(0)
    for plain in ("grpc://rewards.example:1", "http://rewards.example"):
        with pytest.raises(ConfigError, match="sent in clear"):
            open_transport(plain, key="secret")


async def test_the_third_partys(third_party_server: str, checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Twice what gRPC itself allows.
    monkeypatch.setattr("rollmesh.reward_service.conformance.probes.load.MAX_MESSAGE", 8 << 20)
    report = await checked(third_party_server)
    assert not report.findings
    assert report.server == "example 1"


def test_the_command(third_party_server: str, rollmesh: Command, tmp_path: Path) -> None:
    good = rollmesh("reward", "check", third_party_server, "--strict", "--json", "--only", "answers")
    assert good.returncode == 0, good.stdout + good.stderr
    assert json.loads(good.stdout)["schema"] == 1
    bad = rollmesh("reward", "check", third_party_server, "--only", "known", "--pack", "gsm8k")
    assert bad.returncode == 1
    assert "not usable" in bad.stdout
    assert rollmesh("reward", "check", "grpc://127.0.0.1:9", "--timeout", "0.3").returncode == 5
    for wrong in ("grpc://127.0.0.1", "grpc://:1", "grpc://host:99999", "grpc://host:1/path", "ftp://host:1"):
        refused = rollmesh("reward", "check", wrong)
        assert refused.returncode == 2
        assert "is not host:port with a scheme" in refused.stderr
    assert rollmesh("reward", "check", third_party_server, "--pack", "nothing").returncode == 2
    assert rollmesh("reward", "check", third_party_server, "--samples", str(tmp_path / "none.jsonl")).returncode == 3


RESTARTING = """
import pathlib, runpy, sys
marker = pathlib.Path(sys.argv.pop(1))
if {once} and marker.exists():
    sys.exit("another one is running")
marker.touch()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("once", [False, True])
async def test_servers_that_are_killed_in_a_call(
    once: bool, foreign_python: Path, free_port: int, checked: Any, tmp_path: Path
) -> None:
    (tmp_path / "start.py").write_text(RESTARTING.format(once=once))
    server = REPOSITORY / "examples" / "reward_server" / "python" / "server.py"
    command = [str(foreign_python), str(tmp_path / "start.py"), str(tmp_path / "lock"), str(server), str(free_port)]
    report = await checked(f"grpc://127.0.0.1:{free_port}", "restart", restart=command)
    assert [finding.probe for finding in report.findings] == ["restart.kill"] * once
    assert "restart.kill" not in report.skipped
    if once:
        assert "did not come back" in report.findings[0].message


async def test_a_command_that_starts_nothing(free_port: int, checked: Any) -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    report = await checked(f"grpc://127.0.0.1:{free_port}", "restart", restart=command)
    assert not report.reachable
    assert "ended with status 3" in report.findings[0].message
