"""The checks of a release; also that its workflows call what exists."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from deploy.release import faults
from tests.repository import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yaml"))
CHANGES = "# Changes\n\n## 1.2.0 (unreleased)\n\n## 1.1.0 (2030-01-31)\n"


@pytest.mark.parametrize(
    ("tag", "version", "said"),
    [
        ("v1.1.0", "1.1.0", []),
        ("v1.1.1", "1.1.0", ["tag v1.1.0"]),
        ("1.1.0", "1.1.0", ["tag v1.1.0"]),
        ("v1.2.0", "1.2.0", ["write the date"]),
        ("v1.3.0", "1.3.0", ["write what changed"]),
        ("v2", "1.2.0", ["set the version", "write the date"]),
    ],
)
def test_a_release_is_what_its_tag_says(tag: str, version: str, said: list[str]) -> None:
    found = faults(tag, version, CHANGES)
    assert len(found) == len(said)
    for text, part in zip(found, said, strict=True):
        assert part in text


def _steps(workflow: dict[str, Any]) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_what_exists(path: Any) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    dockerfile = (REPOSITORY / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    assert workflow["permissions"] == {"contents": "read"}, "a job asks for more itself"
    for step in _steps(workflow):
        for target in re.findall(r"make ([a-z-]+)", step):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"
        for module in re.findall(r"-m ([\w.]+)", step):
            assert (REPOSITORY / f"{module.replace('.', '/')}.py").exists()
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for engine in matrix.get("engine", []):
            assert f" AS engine-{engine}\n" in dockerfile
        for device in matrix.get("device", []):
            assert f" AS base-{device}\n" in dockerfile
