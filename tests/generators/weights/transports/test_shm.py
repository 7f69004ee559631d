"""Files in shared memory that are gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh.errors import VersionGoneError
from mesh.weights import Wanted
from tests.generators.weights.transports.cases import CASES
from tests.generators.weights.transports.world import Arrivals, local_learner

CASE = next(case for case in CASES if case.name == "shm")


async def test_a_version_that_was_let_go_of_is_told_from_one_that_fails(tmp_path: Path) -> None:
    async with local_learner(CASE, tmp_path) as learner:
        wanted = Wanted.full(learner.publish(0))
        for version in range(1, 4):
            learner.publish(version)
        with pytest.raises(VersionGoneError, match="No such file"):
            await learner.receiver().receive(learner.fetch(wanted), Arrivals(wanted))
