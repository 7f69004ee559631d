"""Memory that a run took, compared with its plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmesh.mesh.config.models import Config
from rollmesh.planning.cluster import GIB, parse_devices
from rollmesh.planning.command import plan_run
from rollmesh.planning.measured import read_measured
from rollmesh.planning.report import Findings, lines, to_json
from rollmesh.report.summary import FinalState, write_summary
from tests.rollmesh.planning.plans import configured

SERVICES = {"buffer": GIB, "learner": 20 * GIB, "generator-0": 4 * GIB, "generator-1": 2 * GIB}
ROLLOUT = {"engine": "hf", "replicas": 2, "hf": {"kv_cache_gib": 1.0}}


def compared(config: Config, folder: Path, devices: str, *, metrics: dict[str, float]) -> Findings:
    """Writes the folder of a run that has ended, and plans the same run."""
    folder.mkdir()
    steps = [
        {"step": step, "time": 1e6 + step, "wall_s": float(step), "critic/score/mean": 0.5, "total/tokens": step}
        | {name: value / step for name, value in metrics.items()}
        for step in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in steps))
    write_summary(folder, config, FinalState(peak_memory_bytes=SERVICES))
    return plan_run(config, parse_devices(devices), run=folder)


def test_services_on_cpus_are_compared_by_their_resident_memory(tmp_path: Path) -> None:
    config = configured("qwen3-0.6b", rollout=ROLLOUT, learner={"ranks": 2})
    found = compared(config, tmp_path / "run", "1xCPU-64G", metrics={})
    assert found.measured is not None
    rows = {row.name: row for row in found.measured.rows}
    plan = found.plan

    # Ranks' own memory on a CPU, what they keep for others, and their interpreters.
    wanted = 2 * plan.learner_peak + sum(plan.host.values()) + 2 * plan.cluster.process
    assert rows["learner, host memory"].planned == wanted
    assert rows["learner, host memory"].ratio == wanted / (20 * GIB)
    assert plan.generator is not None
    for name, size in (("generator-0", 4 * GIB), ("generator-1", 2 * GIB)):
        row = rows[f"{name}, host memory"]
        assert (row.planned, row.measured) == (plan.generator.total + plan.cluster.process, size)
    assert rows["buffer, host memory"].planned is rows["buffer, host memory"].ratio is None
    assert list(rows)[-1] == "buffer, host memory", "those without a plan come last"
    text = [" ".join(line.split()) for line in lines(found)]
    at = text.index(f"measured in {tmp_path / 'run'}:")
    assert text[at + 1] == "GiB at the peak planned measured planned / measured"
    assert "buffer, host memory - 1.00 -" in text[at:]
    assert f"learner, host memory {wanted / GIB:.2f} 20.00 {wanted / (20 * GIB):.2f}" in text[at:]
    assert not any("memory of a device" in line for line in text)


def test_a_devices_memory_is_the_largest_of_any_step(tmp_path: Path) -> None:
    config = configured("qwen3-0.6b", rollout=ROLLOUT, learner={"ranks": 2})
    found = compared(config, tmp_path / "run", "8xH100-80G", metrics={"perf/max_memory_allocated_gb": 10.0})
    assert read_measured(tmp_path / "run").device_bytes == 10 * GIB
    assert found.measured is not None
    rows = {row.name: row for row in found.measured.rows}
    device = rows["learner, memory of a device"]
    assert (device.planned, device.measured) == (found.plan.learner_peak, 10 * GIB)
    assert device.ratio == pytest.approx(found.plan.learner_peak / (10 * GIB))
    host = rows["learner, host memory"].planned
    assert host == sum(found.plan.host.values()) + 2 * found.plan.cluster.process, "weights are on the device"
    told = json.loads(json.dumps(to_json(found)))["measured"]
    assert told["rows"][-1]["name"] == "learner, memory of a device"
