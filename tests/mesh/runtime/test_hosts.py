"""Host identity: equal within a machine and IPC namespace, different across namespaces."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollmesh.mesh.runtime.hosts import host_id, is_loopback
from tests.repository import REPOSITORY

_PRINT = [sys.executable, "-c", "from rollmesh.mesh.runtime.hosts import host_id; print(host_id())"]


def test_processes_of_one_machine_agree() -> None:
    found = subprocess.run(_PRINT, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=180)
    assert found.stdout.strip() == host_id()


def test_another_ipc_namespace_is_another_host() -> None:
    found = subprocess.run(["unshare", "-i", *_PRINT], cwd=REPOSITORY, capture_output=True, text=True, timeout=180)
    if found.returncode:
        pytest.skip(f"no right to make a namespace: {found.stderr.strip()}")
    assert found.stdout.strip() != host_id()


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("localhost", True)),
        *(("unix:/run/it", True), ("0.0.0.0", False), ("::", False), ("10.0.0.7", False), ("node-1", False)),
        *(("localhost.example", False), ("127.0.0.1.example", False), ("", False)),
    ],
)
def test_what_stays_on_this_machine(host: str, is_here: bool) -> None:
    assert is_loopback(host) is is_here
