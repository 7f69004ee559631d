"""The script for a machine's first day with a GPU: what it would run can be run."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from benchmarks.common import REPOSITORY
from rollmesh.launcher.placement.devices import assign_devices
from rollmesh.launcher.placement.visible import VisibleDevices
from rollmesh.mesh.config import load_config


def test_every_run_that_it_would_start_has_devices_and_a_configuration(tmp_path: Path) -> None:
    script = REPOSITORY / "benchmarks" / "first_gpu.sh"
    subprocess.run([script, "--dry-run", "--out", tmp_path], check=True, capture_output=True, timeout=240)
    report = (tmp_path / "REPORT.md").read_text(encoding="utf-8")
    commands = [shlex.split(block) for block in re.findall(r"```\n(.*?)\n```", report, re.DOTALL)]
    runs = [command for command in commands if command[:2] == [".venv/bin/rollmesh", "run"]]
    engines = []
    for _, _, path, *overrides in runs:
        config = load_config(REPOSITORY / path, overrides)
        engines.append(config.rollout.engine)
        # One device is shared by name; the larger runs are for machines that have four.
        count = 1 if config.placement.devices.learner else 4
        plan = assign_devices(config, VisibleDevices(tuple(map(str, range(count))), count, count))
        assert all(plan.generators)
        assert len(plan.learner) == config.learner.ranks
    assert engines[:3] == ["hf", "vllm", "sglang"]
    assert any(command[1:5] == ["-m", "pytest", "-m", "gpu"] for command in commands)
