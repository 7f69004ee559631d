"""The `sglang` engine on a real server under the contract of all engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.generators.engines.contract import EngineContract
from tests.generators.engines.contract_swaps import SwapContract
from tests.generators.engines.sglang.server import SglangHarness, SharedServer
from tests.generators.engines.tiny import ContractModel

pytestmark = [pytest.mark.engine("sglang")]


class TestSglangEngine(EngineContract):
    @pytest.fixture
    def harness(self, contract_model: ContractModel, sglang_server: SharedServer) -> Iterator[SglangHarness]:
        harness = SglangHarness(contract_model, sglang_server, "keep")
        yield harness
        harness.close()


class TestSglangSwaps(SwapContract):
    """Effects of the KV policy."""

    @pytest.fixture(params=["recompute", "interrupt"])
    def harness(
        self, request: pytest.FixtureRequest, contract_model: ContractModel, sglang_server: SharedServer
    ) -> Iterator[SglangHarness]:
        harness = SglangHarness(contract_model, sglang_server, request.param)
        yield harness
        harness.close()
