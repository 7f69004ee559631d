"""Real vLLM under the contract of all engines, with each KV policy where it matters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from rollmesh.generators.engines.types import KvPolicy
from tests.generators.engines.contract import EngineContract
from tests.generators.engines.contract_pauses import PauseContract
from tests.generators.engines.contract_prefixes import PrefixContract
from tests.generators.engines.contract_streams import StreamContract
from tests.generators.engines.contract_swaps import SwapContract
from tests.generators.engines.harness import EngineHarness
from tests.generators.engines.tiny import ContractModel

if TYPE_CHECKING:
    from tests.generators.engines.vllm.shared import SharedVllm

pytestmark = [pytest.mark.engine("vllm")]


class TestVllmEngine(EngineContract):
    @pytest.fixture
    def harness(self, contract_model: ContractModel, vllm: SharedVllm) -> Iterator[EngineHarness]:
        yield from _harness(contract_model, vllm, "keep")


class TestVllmEngineWithNewKeys(SwapContract, PrefixContract, StreamContract, PauseContract):
    """Effects of a swap on running sequences."""

    @pytest.fixture(params=["recompute", "interrupt"])
    def harness(
        self, request: pytest.FixtureRequest, contract_model: ContractModel, vllm: SharedVllm
    ) -> Iterator[EngineHarness]:
        yield from _harness(contract_model, vllm, request.param)


def _harness(model: ContractModel, vllm: SharedVllm, kv: KvPolicy) -> Iterator[EngineHarness]:
    from tests.generators.engines.vllm.shared import VllmHarness

    harness = VllmHarness(model, vllm, kv)
    yield harness
    harness.close()
