"""The mesh as real containers, where Docker and the images are: trained, each container killed, ledger balanced."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.deploy.containers import DEPLOY, settings


def missing() -> str:
    """The reason why containers cannot be started here; empty: they can."""
    if shutil.which("docker") is None or os.geteuid() != 0:
        return "needs Docker, and root on its machine"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        return "no Docker daemon runs here"
    images = [settings()[name] for name in ("CPU_BASE", "REDIS_IMAGE", "PROMETHEUS_IMAGE")]
    return "" if has_images(*images) else f"pull or import the images first: {', '.join(images)}"


def has_images(*images: str) -> bool:
    """True if Docker has all of these images."""
    return subprocess.run(["docker", "image", "inspect", *images], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_mesh_of_containers_trains_on_whichever_of_them_is_killed() -> None:
    if reason := missing():
        pytest.skip(reason)
    # Grafana is in no package, only in its image.
    options = [] if has_images(settings()["GRAFANA_IMAGE"]) else ["--without", "grafana"]
    command = [sys.executable, DEPLOY / "try_containers.py", "--build", *options]
    trial = subprocess.run(command, capture_output=True, text=True, check=False)
    assert trial.returncode == 0, trial.stdout + trial.stderr
    assert "nothing is left" in trial.stdout
