"""Commands that ask a mesh show it what it wants to see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml
from typer.testing import CliRunner

from rollmesh.cli.app import app
from rollmesh.cli.options import target
from rollmesh.launcher import folder
from rollmesh.launcher.preflight.checks import check_files
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.runtime.service import add_health_and_reflection
from tests.certificates import Authority
from tests.secrets_here import write_secret

_DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def address(authority: Authority) -> Iterator[str]:
    """The address of a service that asks for certificates, and knows no verb."""
    cert, key = authority.certify("service")
    security = SecuritySection(tls_cert=cert, tls_key=key, tls_client_ca=authority.pem)
    bridge = AsyncBridge()

    async def serve() -> tuple[grpc.aio.Server, int]:
        server = new_server(security)
        add_health_and_reflection(server, [])
        port = bind(server, "127.0.0.1", 0, security)
        await server.start()
        return server, port

    server, port = bridge.call(serve(), _DEADLINE_S)
    yield f"127.0.0.1:{port}"
    bridge.call(server.stop(None), _DEADLINE_S)
    del server
    bridge.close()


@pytest.mark.parametrize(
    "command",
    [
        ["status", "--mesh", "{}"],
        ["ledger", "--mesh", "{}"],
        ["weights", "verify", "--mesh", "{}"],
        ["reward", "check", "grpc://{}"],
    ],
    ids=lambda command: command[0],
)
def test_each_command_can_show_a_certificate(command: list[str], address: str, authority: Authority) -> None:
    cert, key = authority.certify("operator")
    shown = ["--tls-ca", str(authority.pem), "--tls-cert", str(cert), "--tls-key", str(key)]
    done = CliRunner().invoke(app, [word.format(address) for word in command] + shown)
    # A call that TLS lets through is refused as unknown.
    assert "UNIMPLEMENTED" in f"{done.output}{done.exception}"


def test_a_run_looks_at_every_key_that_it_names_first() -> None:
    nothing = {"model": {"path": "/absent/model"}, "data": {"train": "/absent.jsonl"}}
    judge = {"endpoints": ["grpc://judge:1"], "key_files": {"grpc://judge:1": "/absent.key"}}
    for named in ({"security": {"endpoint_key_file": "/absent.key"}}, {"reward": judge}):
        with pytest.raises(ConfigError, match=r"_key_file /absent\.key|key_files.* /absent\.key"):
            check_files(load_config({**nothing, **named}))


def test_what_is_given_goes_before_what_the_run_folder_says(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.certify("service")
    token, look = write_secret(tmp_path / "token"), write_secret(tmp_path / "look")
    security = {"token_file": token, "tls_ca": authority.pem, "tls_cert": cert, "tls_key": key}
    config = {
        "model": {"path": "m"},
        "data": {"train": "d"},
        "security": {name: str(path) for name, path in security.items()},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with folder.locked(tmp_path):
        folder.write_mesh(tmp_path, "127.0.0.1:9")
        assert target(tmp_path, None).security == SecuritySection(**security)
        given = target(tmp_path, None, token_file=look, tls_ca=None).security
    assert given == SecuritySection(**{**security, "token_file": look})
    assert target(None, "127.0.0.1:9", token_file=look).security == SecuritySection(token_file=look)


def test_a_learner_over_several_nodes_is_not_started_by_one() -> None:
    absent = {"model": {"path": "/absent/model"}, "data": {"train": "/absent.jsonl"}}
    with pytest.raises(ConfigError, match=r"nodes is 2.*rollmesh learner --node N on each"):
        check_files(load_config(absent, ["learner.distributed={nodes: 2, rendezvous: a:1}", "learner.ranks=2"]))
