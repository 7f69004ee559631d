"""The commands of nodes: certificates, join strings, and every option as a variable."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer

from rollmesh.buffer.server.process import BufferFront
from rollmesh.cli.app import app
from rollmesh.doctor.live import diagnosis
from rollmesh.mesh.access.join_string import parse_join_string
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.variables import OPTIONS, key_variable, option_variable
from rollmesh.mesh.errors import ConfigError, UnauthenticatedError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from tests.command import Command, briefly

SERVICES = ("buffer", "generator", "learner", "evaluator", "role", "reward")
# Options of the command line alone, and those that are keys of the configuration.
NO_VARIABLE = {"config_path", "name", "help", "host"}


@contextmanager
def _front(folder: Path, security: dict[str, str]) -> Iterator[str]:
    """A buffer with TLS on loopback; gives its address."""
    config = load_config(
        {
            "model": {"path": "m"},
            "data": {"train": "t.jsonl"},
            "run": {"dir": str(folder), "name": "run"},
            "security": security,
            "network": {"metrics": False},
        }
    )
    bridge = AsyncBridge("front")
    front = BufferFront(config, host="127.0.0.1", port=0)
    try:
        bridge.call(front.start(), 200)
        yield front.address
    finally:
        bridge.call(front.stop(), 60)
        bridge.close()


def test_a_join_string_and_nothing_else_opens_a_mesh_with_tls(
    tmp_path: Path, rollmesh: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A mesh that does nothing is not watched for long.
    monkeypatch.setattr(diagnosis, "diagnose_mesh", briefly(diagnosis.diagnose_mesh))
    tls, token = tmp_path / "tls", tmp_path / "mesh.token"
    assert rollmesh("token", "new", "--out", str(token)).returncode == 0
    assert rollmesh("certificates", str(tls), "front=mesh.example").returncode == 0
    security = {"token_file": str(token), "tls_cert": str(tls / "front.pem"), "tls_key": str(tls / "front.key")}
    with _front(tmp_path, security) as address:
        arguments = ("--mesh", address, "--token-file", str(token))
        made = rollmesh("token", "join", "observer", *arguments, "--authority", str(tls))
        assert made.returncode == 0, made.stderr
        file = tmp_path / "look.join"
        file.touch(0o600)
        file.write_text(made.stdout)
        examined = json.loads(rollmesh("doctor", "--join", str(file), "--json").stdout)["findings"]
        assert {"ledger", "redis"} <= {found["check"] for found in examined}
        seen = rollmesh("ledger", "--join", str(file), "--json")
        assert seen.returncode == 0, seen.stderr
        assert json.loads(seen.stdout)["balances"]
        monkeypatch.setenv("ROLLMESH_JOIN", made.stdout.strip())
        assert rollmesh("ledger").returncode == 0
        # A run folder that is named goes before variables.
        assert "run-that-is-not" in rollmesh("ledger", str(tmp_path / "run-that-is-not")).stderr
        monkeypatch.delenv("ROLLMESH_JOIN")
        # The authority of another mesh.
        assert rollmesh("certificates", str(tmp_path / "other")).returncode == 0
        strange = rollmesh("token", "join", "observer", *arguments, "--authority", str(tmp_path / "other"))
        file.write_text(strange.stdout)
        refused = rollmesh("ledger", "--join", str(file))
    assert refused.returncode == UnauthenticatedError.exit_code
    assert "does not show the certificate authority of the join string" in refused.stderr


def test_a_join_string_on_the_command_line_is_refused(tmp_path: Path, rollmesh: Command) -> None:
    token = tmp_path / "mesh.token"
    rollmesh("token", "new", "--out", str(token))
    made = rollmesh("token", "join", "generator", "--mesh", "[::1]:7400", "--token-file", str(token))
    assert parse_join_string(made.stdout, "it").mesh == "[::1]:7400"
    refused = rollmesh("generator", "--join", made.stdout.strip())
    assert refused.returncode == ConfigError.exit_code
    assert "a command line can be read by every user" in refused.stderr
    assert made.stdout.strip() not in refused.stderr
    assert "give --mesh HOST:PORT, or --join FILE" in rollmesh("generator").stderr


def test_a_node_that_others_reach_has_a_certificate_in_its_string(tmp_path: Path, rollmesh: Command) -> None:
    tls, token = tmp_path / "tls", tmp_path / "mesh.token"
    rollmesh("token", "new", "--out", str(token))
    rollmesh("certificates", str(tls))
    base = ("token", "join", "generator", "--mesh", "10.0.0.5:7400", "--token-file", str(token), "--host", "10.0.0.7:7")
    made = parse_join_string(rollmesh(*base, "--authority", str(tls)).stdout, "it")
    assert (made.host, made.certificate is not None) == ("10.0.0.7:7", True)
    # Its certificate needs the authority's key.
    refused = rollmesh(*base, "--authority", str(tls / "authority.pem"))
    assert refused.returncode == ConfigError.exit_code
    assert "a certificate for a host needs the authority's key" in refused.stderr


def test_certificates_are_made_once_and_their_keys_are_closed(tmp_path: Path, rollmesh: Command) -> None:
    folder = tmp_path / "tls"
    assert rollmesh("certificates", str(folder), "node1").returncode == 0
    authority = (folder / "authority.pem").read_bytes()
    first = (folder / "node1.pem").read_bytes()
    for key in folder.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    again = rollmesh("certificates", str(folder), "node1")
    assert again.returncode == ConfigError.exit_code
    assert "--renew" in again.stderr
    assert rollmesh("certificates", str(folder), "node1", "node2=10.0.0.8", "--renew").returncode == 0
    assert (folder / "node1.pem").read_bytes() != first
    assert (folder / "authority.pem").read_bytes() == authority
    assert first.endswith(authority)
    assert "cannot name its files" in rollmesh("certificates", str(folder), "../node").stderr


def test_every_option_of_a_service_is_a_variable() -> None:
    """By the one scheme of `mesh.config.variables`; those of keys by the key's."""
    group = typer.main.get_command(app)
    keys, options = set(), set()
    for name in SERVICES:
        command = group.commands[name]  # type: ignore[attr-defined]
        command = command.commands["serve"] if name == "reward" else command
        for parameter in command.params:
            variable = parameter.envvar
            if parameter.name in NO_VARIABLE and variable is None:
                continue
            if name == "buffer" and parameter.name == "port":
                continue  # network.port
            assert isinstance(variable, str), (name, parameter.name)
            (keys if variable.startswith(key_variable("")) else options).add(variable)
    assert options == set(map(option_variable, OPTIONS))
    assert key_variable("network.host") in keys
