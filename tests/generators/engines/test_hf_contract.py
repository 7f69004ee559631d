"""The `hf` engine under the contract of all engines, with each KV policy where it matters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.generators.engines.contract import EngineContract
from tests.generators.engines.contract_pauses import PauseContract
from tests.generators.engines.contract_prefixes import PrefixContract
from tests.generators.engines.contract_streams import StreamContract
from tests.generators.engines.contract_swaps import NewKeysContract, SwapContract
from tests.generators.engines.hf_harness import HfHarness
from tests.generators.engines.tiny import ContractModel


@pytest.fixture
def harness(request: pytest.FixtureRequest, contract_model: ContractModel) -> Iterator[HfHarness]:
    kv, device = getattr(request, "param", ("keep", "cpu"))
    harness = HfHarness(contract_model, kv, device=device)
    yield harness
    harness.close()


class TestHfEngine(EngineContract):
    pass


@pytest.mark.parametrize("harness", [("recompute", "cpu"), ("interrupt", "cpu")], indirect=True)
class TestHfEngineWithNewKeys(NewKeysContract):
    pass


@pytest.mark.exhaustive
@pytest.mark.parametrize("harness", [("recompute", "cpu"), ("interrupt", "cpu")], indirect=True)
class TestHfEngineWithNewKeysInFull(SwapContract, PrefixContract, StreamContract, PauseContract):
    pass


@pytest.mark.gpu
@pytest.mark.parametrize("harness", [(kv, "cuda") for kv in ("keep", "recompute", "interrupt")], indirect=True)
class TestHfEngineOnCuda(EngineContract):
    pass
