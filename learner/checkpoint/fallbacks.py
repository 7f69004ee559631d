"""Fallbacks of a run with a last checkpoint that cannot be loaded: proposed to the user, never chosen.

Going back undoes steps that are committed. Their groups stay trained, so that nothing is trained twice, but the weights
that learned from them are gone. Invariant: only ancestors of the present weights are offered. Groups of steps that were
undone before were offered again, and another checkpoint's weights may have learned from them already.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollmesh.learner.checkpoint.names import list_checkpoints, version_of
from rollmesh.mesh.trajectory.versions import PolicyVersion


def fallback_hint(failed: Path, survives: Callable[[PolicyVersion], bool]) -> str:
    """The hint of an error about a checkpoint that cannot be loaded.

    Args:
        failed: the checkpoint that cannot be loaded, or is not there.
        survives: whether no later learner has undone a version.
    """
    last = version_of(failed.name)
    before = [(v.version, v.incarnation, path.name) for v, path in list_checkpoints(failed.parent) if survives(v)]
    if last is not None:
        before = [found for found in before if found[0] < last.version]
    if last is None or not before:
        return "restore it from a copy, or start over with --fresh: there is no earlier one"
    version, _, name = max(before)
    return (
        f"restore it from a copy; or let `rollmesh run` or `rollmesh learner` continue with --from-checkpoint={name} "
        f"(steps {version + 1} to {last.version} are undone, and groups that were committed with them are not trained "
        "again); or start over with --fresh"
    )
