"""The demonstration's reward, which waits in the middle of a run until the test has looked at the running services.

So the run is no longer than what is asked of its end, however long the looking takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollmesh.reward_service.outcomes import Outcome, RewardItem
from rollmesh.reward_service.scorers import arithmetic

_FOLDER, _STEPS, _RELEASED = "ROLLMESH_TEST_HOLD", "ROLLMESH_TEST_HOLD_AFTER", "released"
# Longer than any test waits.
_TERM_S = 900
ARGUMENTS = (
    f"--reward.functions=['{__file__}:score']",
    *(f"--reward.scorer_timeout_s={_TERM_S}", f"--reward.timeout_s={_TERM_S + 1}"),
    f"--rollout.reward_wait_s={_TERM_S + 2}",
    # While all wait, further ones would be started, up to many.
    "--reward.workers=2",
)


def environment(folder: Path, after: int) -> Mapping[str, str]:
    """Variables of the run whose `run` lies in this folder, and which waits once it has trained so many steps."""
    return {_FOLDER: str(folder), _STEPS: str(after)}


def release(folder: Path) -> None:
    """Lets the run train to its end."""
    (folder / _RELEASED).touch()


def score(items: Sequence[RewardItem]) -> list[Outcome]:
    """As built in, in time."""
    folder = Path(os.environ[_FOLDER])
    after = int(os.environ[_STEPS])
    while _trained(folder / "run" / "metrics.jsonl") >= after and not (folder / _RELEASED).exists():
        time.sleep(0.1)  # another process's file: there is nothing to wait on
    return [arithmetic.score(item) for item in items]


def _trained(metrics: Path) -> int:
    return metrics.read_text().count('"critic/score/mean"') if metrics.exists() else 0
