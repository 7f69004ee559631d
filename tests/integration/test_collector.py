"""A whole trace of a real run, in a real collector: Phoenix, in an environment of its own.

python -m venv phoenix && phoenix/bin/pip install arize-phoenix
ROLLMESH_PHOENIX=phoenix/bin/phoenix pytest tests/integration/test_collector.py
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.world import free_port
from tests.integration.mesh import DEADLINE_S, MeshRun, audit
from tests.integration.traces import WHOLE

_PHOENIX = os.environ.get("ROLLMESH_PHOENIX", "")


@pytest.fixture
def phoenix(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Where it answers, and where it takes traces."""
    web, otlp = free_port(), free_port()
    environment = {
        "PHOENIX_WORKING_DIR": str(tmp_path / "phoenix"),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(web),
        "PHOENIX_GRPC_PORT": str(otlp),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with (tmp_path / "phoenix.log").open("w") as log:
        process = subprocess.Popen([_PHOENIX, "serve"], env={**os.environ, **environment}, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{web}"
            _wait_until(lambda: httpx.get(url, timeout=10).status_code == 200)
            yield url, f"http://127.0.0.1:{otlp}"
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not _PHOENIX, reason="needs ROLLMESH_PHOENIX, the program of an environment with arize-phoenix")
def test_a_collector_shows_the_whole_way_of_a_trajectory(
    start_mesh: Callable[..., MeshRun], phoenix: tuple[str, str]
) -> None:
    web, otlp = phoenix
    run = start_mesh(
        *("--learner.steps=3", "--learner.batch.groups=8", "--checkpoint.every_steps=1", "--rollout.replicas=2"),
        # It takes some twenty spans a second.
        *(f"--telemetry.otlp={otlp}", "--telemetry.sample=0.1"),
        # So that there is a reward service.
        "--reward.by_data_source={elsewhere: ['grpc://127.0.0.1:9']}",
    )
    assert run.finish() == 0, run.tail()
    audit(run)
    found: dict[str, Any] = {}

    def whole() -> bool:
        found.update(next((spans for spans in _traces(web).values() if spans.keys() == _EXPECTED), {}))
        return bool(found)

    _wait_until(whole)
    root = found["trajectory"]
    assert root["attributes"]["rollmesh.fate"] == "trained"
    for span in found.values():
        print(_line(span, root))


_EXPECTED = {*WHOLE, "score"}


def _traces(web: str) -> Mapping[str, dict[str, Any]]:
    """The spans of each trace by name."""
    traces: dict[str, dict[str, Any]] = defaultdict(dict)
    cursor: str | None = ""
    while cursor is not None:
        parameters = {"limit": "1000", **({"cursor": cursor} if cursor else {})}
        page = httpx.get(f"{web}/v1/projects/default/spans", params=parameters, timeout=60).json()
        for span in page.get("data", ()):
            traces[span["context"]["trace_id"]][span["name"]] = span
        cursor = page.get("next_cursor")
    return traces


def _line(span: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    began = _seconds(span["start_time"]) - _seconds(root["start_time"])
    took = _seconds(span["end_time"]) - _seconds(span["start_time"])
    attributes = {name.removeprefix("rollmesh."): value for name, value in sorted(span["attributes"].items())}
    return f"{span['name']:<11} +{began:6.3f} s {took:7.3f} s  " + " ".join(f"{k}={v}" for k, v in attributes.items())


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def _wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        try:
            if holds():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    pytest.fail(f"not after {DEADLINE_S:.0f} s")
