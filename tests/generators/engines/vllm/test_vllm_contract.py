"""Real vLLM under the contract of all engines, with each KV policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from rollmesh.generators.engines.interface import KvPolicy
from tests.generators.engines.contract import EngineContract
from tests.generators.engines.harness import EngineHarness
from tests.generators.engines.tiny import ContractModel

if TYPE_CHECKING:
    from tests.generators.engines.vllm.shared import SharedVllm

_POLICIES: list[KvPolicy] = ["keep", "recompute", "interrupt"]


@pytest.mark.engine("vllm")
@pytest.mark.timeout(900)
class TestVllmEngine(EngineContract):
    @pytest.fixture(params=_POLICIES)
    def harness(
        self, request: pytest.FixtureRequest, contract_model: ContractModel, vllm: SharedVllm
    ) -> Iterator[EngineHarness]:
        from tests.generators.engines.vllm.shared import VllmHarness

        harness = VllmHarness(contract_model, vllm, request.param)
        yield harness
        harness.close()
