"""The kit as one file knows nothing of Rollmesh, and finds the same."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

from rollmesh.reward_service.conformance.build import build, modules

# Beyond the kit itself: what the client checks in every answer, the errors of commands, and the end of a server.
ALSO = {
    "rollmesh.mesh.errors",
    "rollmesh.mesh.runtime.end_signals",
    "rollmesh.mesh.text",
    "rollmesh.protos.reward_pb2",
    "rollmesh.reward_service.client.validation",
    "rollmesh.reward_service.outcomes",
    "rollmesh.reward_service.samples",
}


def test_it_holds_the_kit_and_little_else() -> None:
    beyond = {name for name in modules() if not name.startswith("rollmesh.reward_service.conformance.")}
    assert beyond == ALSO


def test_it_runs_where_rollmesh_is_not(foreign_python: Path, third_party_server: str, tmp_path: Path) -> None:
    kit = tmp_path / "kit.pyz"
    build(kit)
    assert any(name.endswith("packs/gsm8k.jsonl") for name in zipfile.ZipFile(kit).namelist())
    command = [foreign_python, "-I", kit, "check", third_party_server, "--strict", "--json", "--only", "identity"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    report = json.loads(shown.stdout)
    assert (report["usable"], report["server"]) == (True, "example 1")
    away = subprocess.run([*command[:4], "grpc://127.0.0.1:9", "--timeout", "0.3"], capture_output=True, timeout=240)
    assert away.returncode == 5
