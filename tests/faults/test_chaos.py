"""A short run of the mesh under faults: kills, a partition, a zombie learner, overlaps.

`benchmarks.faults.chaos` is the long one.
"""

from pathlib import Path

import pytest

from tests.faults.chaos import Chaos
from tests.faults.report import merged, summary
from tests.faults.schedule import short
from tests.faults.world import Settings

SEED = 1


@pytest.mark.slow
def test_nothing_is_lost_or_trained_twice_whatever_is_killed_cut_or_stopped(tmp_path: Path, data: Path) -> None:
    settings = Settings(lease_s=2.0, staleness=1, evaluation=True, groups=4, n=2)
    told: list[str] = []
    chaos = Chaos(tmp_path, data, settings, told.append)
    outcome = chaos.run(short(SEED, lease_s=settings.lease_s), seed=SEED, seconds=float("inf"))
    assert outcome.sound, "\n".join(told) + "\n" + summary(merged([outcome.as_json()]))
    assert outcome.audit is not None
    assert outcome.audit.conserved
    assert (outcome.audit.lost_groups, outcome.audit.lost_trajectories, outcome.audit.duplicated) == (0, 0, 0)
    assert {"zombie learner", "lost_tail redis", "kill_fronts"} <= {fault.kind for fault in outcome.faults}
    cut_off = next(fault for fault in outcome.faults if fault.kind == "away_cut learner>front")
    assert cut_off.steps <= 1, "a learner without a buffer continued: does the fault do anything?"
    assert outcome.stalls == []
    assert outcome.losses == 1
    assert outcome.evaluations > 0
    assert outcome.balanced == outcome.rounds
