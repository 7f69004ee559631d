"""A finished run is recognized by its folder, and a learner of it answers health checks until it is asked to end."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.learner import standby
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.mesh.config import load_config
from tests.learner.live.tiny import meanwhile

_CALL_S = 60.0


def finished(folder: Path, checkpoint: str = "i0002-v00000012", **fields: object) -> str:
    (folder / CHECKPOINTS_NAME / checkpoint).mkdir(parents=True, exist_ok=True)
    said: dict[str, Any] = {"incarnation": 2, "version": 12, "stop_reason": "steps", **fields}
    (folder / "learner.json").write_text(json.dumps(said))
    return standby.how_finished(folder)


@pytest.mark.parametrize("reason", ["steps", "stop_at", "end_of_data", "request"])
def test_a_run_is_finished_by_these_ends(tmp_path: Path, reason: str) -> None:
    assert finished(tmp_path, stop_reason=reason) == reason


def test_in_doubt_a_run_is_not_finished(tmp_path: Path) -> None:
    assert standby.how_finished(tmp_path) == ""
    for fields in (
        {"stop_reason": "SIGTERM"},
        {"version": 11},
        {"incarnation": 1},
        {"version": "?"},
        {"version": None},
    ):
        assert finished(tmp_path, **fields) == ""
    assert finished(tmp_path) == "steps"
    assert finished(tmp_path, checkpoint="i0003-v00000013") == "", "another learner has continued it"
    (tmp_path / "learner.json").write_text("{")
    assert standby.how_finished(tmp_path) == ""


def test_it_answers_until_it_is_asked_to_end(tmp_path: Path) -> None:
    config = load_config({"run": {"dir": str(tmp_path)}, "model": {"path": "m"}, "data": {"train": "d"}})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def ask() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=_CALL_S, wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        os.kill(os.getpid(), signal.SIGTERM)

    before = logging.getLogger().handlers[:]
    try:
        with meanwhile(ask):
            assert standby.run(config, "steps", port=port) == 0
    finally:
        logging.getLogger().handlers[:] = before
