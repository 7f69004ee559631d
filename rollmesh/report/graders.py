"""The scorers of a run and the packages with which they grade mathematics: versions in the scorers' environment.

Rewards depend on them: the same answer may be right with one version and wrong with another.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Sequence

from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.config.scorers import classifier, judge, process
from rollmesh.mesh.config.scorers.parts import all_uses
from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.judge.judge import judge_version
from rollmesh.reward_service.judge.templates import Template
from rollmesh.reward_service.routing import split_routes
from rollmesh.reward_service.scorers.versions import versions_of, versions_with_packages
from rollmesh.reward_service.served_model.options import told_version

_ASK = (
    "import json, sys; from rollmesh.reward_service.scorers.versions import versions_with_packages as versions; "
    "print(json.dumps(versions(sys.argv[1:])))"
)
_DEADLINE_S = 30.0


def grader_versions(config: Config) -> dict[str, str]:
    """Versions by scorer and package; empty where this mesh runs no scorer by name, or its environment is gone."""
    reward = config.reward
    local, _ = split_routes(reward.by_data_source)
    names = all_uses(() if reward.endpoints else reward.functions, local)
    return {**_configured(reward, names), **(_by_name(config, names) if versions_of(names) else {})}


def _configured(reward: RewardSection, names: Sequence[str]) -> dict[str, str]:
    """Versions of the scorers that are models; none of a model that is not on this host."""
    found = {}
    for name, section in ((classifier.NAME, reward.classifier), (process.NAME, reward.process)):
        if name in names:
            with contextlib.suppress(OSError):
                found[name] = told_version(section)
    if judge.NAME in names:
        with contextlib.suppress(RewardError):
            asked = reward.judge
            found[judge.NAME] = judge_version(asked, Template(asked.template, asked.mode, asked.scale))
    return found


def _by_name(config: Config, names: Sequence[str]) -> dict[str, str]:
    reward = config.reward
    python = config.rollout.python if reward.in_process else reward.python
    if python is None:
        return versions_with_packages(names)
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK, *names], capture_output=True, text=True, timeout=_DEADLINE_S, check=True
        )
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}
    return found
