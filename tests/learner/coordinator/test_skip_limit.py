"""The life of a run whose gradients are not finite."""

from __future__ import annotations

import pytest

from rollmesh.learner.coordinator.skip_limit import SkipLimit
from rollmesh.mesh.errors import DivergedError


def test_a_run_outlives_some_batches_without_a_step_and_ends_with_one_more() -> None:
    limit = SkipLimit(2)
    for version in range(6):
        # Every third batch is followed.
        limit.record(version, {"actor": version % 3 != 2})
        assert limit.healthy == (version % 3 == 2)
    limit.record(6, {"actor": True})
    limit.record(7, {"actor": True})
    with pytest.raises(
        DivergedError, match=r"the actor's gradient was not finite in 3 batches in a row, .* version 8;"
    ):
        limit.record(8, {"actor": True})


def test_every_role_counts_for_itself_and_a_batch_without_its_share_changes_nothing() -> None:
    limit = SkipLimit(2)
    limit.record(0, {"actor": False, "critic": True})
    limit.record(1, {"actor": False})
    limit.record(2, {"actor": False, "critic": True})
    assert not limit.healthy
    with pytest.raises(DivergedError, match="the critic's"):
        limit.record(3, {"actor": False, "critic": True})


def test_a_batch_that_trained_nothing_is_not_healthy_and_ends_no_run() -> None:
    limit = SkipLimit(1)
    limit.record(0, {"actor": False})
    assert limit.healthy
    for version in range(1, 5):
        limit.record(version, {})
        assert not limit.healthy, "a checkpoint would hold the weights of the one before"
