"""Learner and generators on shared devices, killed and stopped amid the swaps between them.

`benchmarks.faults.chaos --turns` strikes every process in every phase.
"""

from pathlib import Path

import pytest

from tests.faults.chaos import Chaos
from tests.faults.report import merged, summary
from tests.faults.schedule import short_turns
from tests.faults.world import Settings

SEED = 1


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_nothing_is_lost_or_trained_twice_whoever_is_killed_or_stopped_amid_a_swap(
    tmp_path: Path, data: Path, half: int
) -> None:
    settings = Settings(lease_s=3.0, staleness=1, turns=True, groups=4, n=2)
    told: list[str] = []
    chaos = Chaos(tmp_path, data, settings, told.append)
    rounds = short_turns(SEED, lease_s=settings.lease_s, step_s=settings.step_s)[half]
    outcome = chaos.run(rounds, seed=SEED, seconds=float("inf"))
    assert outcome.sound, "\n".join(told) + "\n" + summary(merged([outcome.as_json()]))
    assert outcome.audit is not None
    assert outcome.audit.conserved
    assert (outcome.audit.lost_groups, outcome.audit.lost_trajectories, outcome.audit.duplicated) == (0, 0, 0)
    assert outcome.stalls == []
    assert outcome.balanced == outcome.rounds == len(rounds) == 3
