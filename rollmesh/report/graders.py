"""The packages with which a run has graded mathematics: versions in its scorers' environment.

Rewards depend on them: the same answer may be right with one version and wrong with another.
"""

from __future__ import annotations

import json
import subprocess
from itertools import chain

from rollmesh.mesh.config.models import Config
from rollmesh.reward_service.routing import split_routes
from rollmesh.reward_service.scorers import reads_mathematics
from rollmesh.reward_service.scorers.graders import versions

_ASK = "import json; from rollmesh.reward_service.scorers.graders import versions; print(json.dumps(versions()))"
_DEADLINE_S = 30.0


def grader_versions(config: Config) -> dict[str, str]:
    """Versions by package; empty where no scorer of this mesh reads mathematics, or its environment is gone."""
    reward = config.reward
    local, _ = split_routes(reward.by_data_source)
    names = [*(() if reward.endpoints else reward.functions), *chain.from_iterable(local.values())]
    if not any(map(reads_mathematics, names)):
        return {}
    python = config.rollout.python if reward.in_process else reward.python
    if python is None:
        return versions()
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK], capture_output=True, text=True, timeout=_DEADLINE_S, check=True
        )
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}
    return found
