"""`ExternalEngine` under the contract of all engines, over a backend in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.generators.engines.contract import EngineContract
from tests.generators.engines.contract_life import LifeContract
from tests.generators.engines.contract_pauses import PauseContract
from tests.generators.engines.external.driven_harness import RestartingHarness, ScriptedHarness
from tests.generators.engines.harness import EngineHarness


class TestDrivenEngine(EngineContract):
    @pytest.fixture(params=[("keep", 1), ("recompute", 3), ("interrupt", 1)], ids=lambda param: param[0])
    def harness(self, request: pytest.FixtureRequest) -> Iterator[EngineHarness]:
        harness = ScriptedHarness(*request.param)
        yield harness
        harness.close()
        assert harness.unfinished() == 0


class TestDrivenEngineThatEndsAsleep(PauseContract, LifeContract):
    @pytest.fixture(params=["keep", "interrupt"])
    def harness(self, request: pytest.FixtureRequest) -> Iterator[EngineHarness]:
        harness = RestartingHarness(request.param)
        yield harness
        harness.close()
        assert harness.unfinished() == 0
        assert all("stop" in backend.calls for backend in (*harness.ended, harness.backend))
