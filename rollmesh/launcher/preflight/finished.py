"""Decides from its files whether a restarted run has anything left to do; in doubt it has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.launcher import folder as folders
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, newest_version
from rollmesh.learner.evaluation.measurement_identity import measured_by
from rollmesh.learner.recovery.run_identity import LEARNER_JSON
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.run_files import SUMMARY


@dataclass(frozen=True, slots=True)
class _NaturalEnd:
    """The natural end of a run's last learner: its reason, its version, and whether that has a held-out value."""

    reason: str
    version: int
    evaluated: bool


def why_finished(config: Config, changes: Sequence[str]) -> str:
    """The reason why nothing is left to do; empty where something is, or may be.

    Args:
        config: of the present attempt.
        changes: since the last one (`Continuation.changes`).
    """
    end = _natural_end(config)
    if end is None:
        return ""
    if end.reason == "stop_at" and not changes:
        return f"its held-out reward has reached eval.stop_at ({config.eval.stop_at:g}) after {end.version} steps"
    if end.reason == "steps" and end.version >= config.learner.steps and (end.evaluated or config.data.eval is None):
        return f"it has trained {end.version} steps, and learner.steps is {config.learner.steps}"
    return ""


def _natural_end(config: Config) -> _NaturalEnd | None:
    """The last learner's natural end; None where it ended otherwise, and where the run has continued since."""
    folder = config.run.folder
    last = folder / LEARNER_JSON
    try:
        ended = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["ended"]
        recorded = json.loads(last.read_text(encoding="utf-8"))
        policy = PolicyVersion(int(recorded["incarnation"]), int(recorded["version"]))
        value = recorded["eval_last"]
        evaluated = value and (value["version"], value["measured_by"]) == (policy.version, measured_by(config))
        taken_over_since = last.stat().st_mtime_ns < folders.takeover_stamp(folder)
        reason = str(recorded["stop_reason"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if ended != "finished" or taken_over_since or newest_version(folder / CHECKPOINTS_NAME) != policy:
        return None
    return _NaturalEnd(reason, policy.version, bool(evaluated))
