"""The message to a user whose last checkpoint cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.checkpoint_choice import checkpoint_path
from rollmesh.learner.checkpoint.fallbacks import fallback_hint
from rollmesh.learner.checkpoint.names import checkpoint_name
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.versions import PolicyVersion


def test_the_newest_ancestor_is_offered_with_what_it_costs(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    # Incarnation 2 continued from version 20: the steps after it of incarnation 1 are undone.
    for version in (PolicyVersion(1, 10), PolicyVersion(1, 20), PolicyVersion(1, 28), PolicyVersion(2, 30)):
        (root / checkpoint_name(version)).mkdir(parents=True)
    last = root / checkpoint_name(PolicyVersion(2, 30))

    def survives(version: PolicyVersion) -> bool:
        return version.incarnation == 2 or version.version <= 20

    for _ in range(2):
        said = fallback_hint(last, survives)
        assert "--from-checkpoint=i0001-v00000020 " in said
        assert "steps 21 to 30 are undone" in said
        # The same where it is gone.
        if last.exists():
            last.rmdir()
    first = root / checkpoint_name(PolicyVersion(1, 10))
    assert "there is no earlier one" in fallback_hint(first, survives)
    assert "there is no earlier one" in fallback_hint(tmp_path / "nowhere" / first.name, survives)


def test_a_checkpoint_is_chosen_by_its_name(tmp_path: Path) -> None:
    name = checkpoint_name(PolicyVersion(1, 10))
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert checkpoint_path(tmp_path, name) == tmp_path / "checkpoints" / name
    with pytest.raises(DataError, match=f"it has: best, {name}"):
        checkpoint_path(tmp_path, "i0001-v00000011")
    with pytest.raises(DataError, match="no best checkpoint"):
        checkpoint_path(tmp_path, "best")
