"""The names of checkpoints: they carry the version that they hold. Nothing heavy is imported here."""

from __future__ import annotations

import re
from pathlib import Path

from mesh.versions import PolicyVersion

CHECKPOINTS_NAME = "checkpoints"
"""Folder of the checkpoints in a run's."""
STATE_NAME = "state.json"
"""What every engine writes into each, beside its tensors."""
_NAME = re.compile(r"^i(\d{4,})-v(\d{8,})$")


def name_of(version: PolicyVersion) -> str:
    """The name of a version's checkpoint."""
    return f"i{version.incarnation:04d}-v{version.version:08d}"


def listed(root: Path) -> list[tuple[PolicyVersion, Path]]:
    """Complete checkpoints below a folder, by incarnation and version."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        match = _NAME.match(path.name)
        if match and path.is_dir():
            found.append((PolicyVersion(int(match[1]), int(match[2])), path))
    return sorted(found)


def newest(root: Path) -> PolicyVersion | None:
    """The version of the checkpoint of the newest learner that was written last."""
    found = listed(root)
    return found[-1][0] if found else None
