"""The names of checkpoints: they carry the version that they hold. Nothing heavy is imported here."""

from __future__ import annotations

import re
from pathlib import Path

from rollmesh.mesh.trajectory.versions import PolicyVersion

CHECKPOINTS_NAME = "checkpoints"
"""Folder of the checkpoints in a run's."""
_NAME = re.compile(r"^i(\d{4,})-v(\d{8,})$")


def checkpoint_name(version: PolicyVersion) -> str:
    """The name of a version's checkpoint."""
    return f"i{version.incarnation:04d}-v{version.version:08d}"


def version_of(name: str) -> PolicyVersion | None:
    """The version in a checkpoint's name; None for other names."""
    match = _NAME.match(name)
    return PolicyVersion(int(match[1]), int(match[2])) if match else None


def list_checkpoints(root: Path) -> list[tuple[PolicyVersion, Path]]:
    """Complete checkpoints below a folder, by incarnation and version."""
    if not root.is_dir():
        return []
    found = ((version_of(path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted((version, path) for version, path in found if version is not None)


def newest_version(root: Path) -> PolicyVersion | None:
    """The version of the checkpoint of the newest learner that was written last."""
    found = list_checkpoints(root)
    return found[-1][0] if found else None
