"""One of two ranks of a learner, in a process that torchrun forks; arguments: configuration, mesh."""

from __future__ import annotations

from pathlib import Path

# Before the ranks are forked: most of their time is that of imports.
import rollmesh.learner.engines.fsdp2.create
import rollmesh.learner.model_files.shared_parts  # noqa: F401
from rollmesh.learner.service import run
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.runtime.ranks import under_torchrun


def main(config_file: Path, mesh: Path) -> None:
    assert under_torchrun()
    raise SystemExit(run(Config.model_validate_json(config_file.read_text(encoding="utf-8")), str(mesh)))
