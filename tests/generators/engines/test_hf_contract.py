"""The `hf` engine under the contract of all engines, with each KV policy where it matters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.generators.engines.contract import EngineContract
from tests.generators.engines.contract_pauses import PauseContract
from tests.generators.engines.contract_prefixes import PrefixContract
from tests.generators.engines.contract_streams import StreamContract
from tests.generators.engines.contract_swaps import SwapContract
from tests.generators.engines.hf_harness import HfHarness
from tests.generators.engines.tiny import ContractModel


class TestHfEngine(EngineContract):
    @pytest.fixture
    def harness(self, contract_model: ContractModel) -> Iterator[HfHarness]:
        harness = HfHarness(contract_model, "keep")
        yield harness
        harness.close()


class TestHfEngineWithNewKeys(SwapContract, PrefixContract, StreamContract, PauseContract):
    """Effects of a swap on running sequences."""

    @pytest.fixture(params=["recompute", "interrupt"])
    def harness(self, request: pytest.FixtureRequest, contract_model: ContractModel) -> Iterator[HfHarness]:
        harness = HfHarness(contract_model, request.param)
        yield harness
        harness.close()


@pytest.mark.gpu
class TestHfEngineOnCuda(EngineContract):
    @pytest.fixture(params=["keep", "recompute", "interrupt"])
    def harness(self, request: pytest.FixtureRequest, contract_model: ContractModel) -> Iterator[HfHarness]:
        harness = HfHarness(contract_model, request.param, device="cuda")
        yield harness
        harness.close()
