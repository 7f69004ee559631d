"""The `hf` engine under the contract of all engines, with each KV policy where it matters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.generators.engines.contract import EngineContract
from tests.generators.engines.contract_grammars import GrammarContract, GrammarSwapContract
from tests.generators.engines.contract_life import LifeContract
from tests.generators.engines.contract_pauses import PauseContract
from tests.generators.engines.contract_prefixes import PrefixContract
from tests.generators.engines.contract_refusals import RefusalContract
from tests.generators.engines.contract_results import RefillContract, ResultContract
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


@pytest.mark.usefixtures("recorded")
class TestHfEngine(SwapContract, RefillContract):
    """Both ways to decode differ in no more than the forward pass of a step: swaps and sizes of steps matter to it."""


class TestHfEngineThatRecordsNothing(
    ResultContract, RefusalContract, PrefixContract, StreamContract, GrammarContract, LifeContract, PauseContract
):
    """The rest of the contract."""


@pytest.mark.exhaustive
@pytest.mark.usefixtures("recorded")
class TestHfEngineInFull(
    ResultContract, RefusalContract, PrefixContract, StreamContract, GrammarContract, LifeContract, PauseContract
):
    pass


@pytest.mark.exhaustive
class TestHfEngineThatRecordsNothingInFull(SwapContract):
    pass


@pytest.mark.parametrize("harness", [("recompute", "cpu"), ("interrupt", "cpu")], indirect=True)
class TestHfEngineWithNewKeys(NewKeysContract, GrammarSwapContract):
    pass


@pytest.mark.exhaustive
@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("harness", [("recompute", "cpu"), ("interrupt", "cpu")], indirect=True)
class TestHfEngineWithNewKeysInFull(
    NewKeysContract, SwapContract, PrefixContract, StreamContract, GrammarContract, PauseContract
):
    pass


@pytest.mark.gpu
@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("harness", [(kv, "cuda") for kv in ("keep", "recompute", "interrupt")], indirect=True)
class TestHfEngineOnCuda(EngineContract):
    pass
