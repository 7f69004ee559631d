"""The configuration of a run: what was set, and all of it; and how the settings of several runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmesh.dashboard.run_view import RunView
from rollmesh.mesh.config import yaml_text
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.report.changes import describe_changes
from rollmesh.run_files import config_path


def settings_document(view: RunView) -> dict[str, Any] | None:
    """Settings that differ from the defaults, as YAML, and the whole configuration; None where it is not known."""
    if view.config is None or view.folder is None:
        return None
    chosen = view.config.model_dump(mode="json", exclude_defaults=True)
    return {
        "chosen": yaml_text.write(chosen),
        "whole": config_path(view.folder).read_text(encoding="utf-8"),
    }


def compare_settings(configs: Sequence[Config | TrainerConfig | None]) -> list[list[str]]:
    """For each further run its settings that differ from those of the first: `KEY OLD -> NEW`."""
    first, *others = (config.model_dump(mode="json") if config is not None else None for config in configs)
    return [describe_changes(first, other) if first is not None and other is not None else [] for other in others]
