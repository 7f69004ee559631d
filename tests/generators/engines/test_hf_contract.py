"""The `hf` engine under the contract of all engines, with each KV policy where it matters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollmesh.generators.engines.hf import decoder
from rollmesh.generators.engines.hf.model.traced_forward import DirectForward
from tests.generators.engines.contract import EngineContract
from tests.generators.engines.contract_grammars import GrammarContract, GrammarSwapContract
from tests.generators.engines.contract_life import LifeContract
from tests.generators.engines.contract_pauses import PauseContract
from tests.generators.engines.contract_prefixes import PrefixContract
from tests.generators.engines.contract_refusals import RefusalContract
from tests.generators.engines.contract_results import ResultContract
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


@pytest.fixture
def directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a model that cannot be recorded."""
    monkeypatch.setattr(decoder, "record", lambda loaded, *_: DirectForward(loaded.model))


class TestHfEngine(ResultContract, SwapContract, PrefixContract, GrammarContract):
    pass


@pytest.mark.usefixtures("directly")
class TestHfEngineThatRecordsNothing(RefusalContract, StreamContract, LifeContract, PauseContract):
    """Half of the contract on each way to decode: they differ in no more than the forward pass."""


@pytest.mark.exhaustive
class TestHfEngineInFull(RefusalContract, StreamContract, LifeContract, PauseContract):
    pass


@pytest.mark.exhaustive
@pytest.mark.usefixtures("directly")
class TestHfEngineThatRecordsNothingInFull(ResultContract, SwapContract, PrefixContract):
    pass


@pytest.mark.parametrize("harness", [("recompute", "cpu"), ("interrupt", "cpu")], indirect=True)
class TestHfEngineWithNewKeys(NewKeysContract, GrammarSwapContract):
    pass


@pytest.mark.exhaustive
@pytest.mark.parametrize("harness", [("recompute", "cpu"), ("interrupt", "cpu")], indirect=True)
class TestHfEngineWithNewKeysInFull(SwapContract, PrefixContract, StreamContract, GrammarContract, PauseContract):
    pass


@pytest.mark.gpu
@pytest.mark.parametrize("harness", [(kv, "cuda") for kv in ("keep", "recompute", "interrupt")], indirect=True)
class TestHfEngineOnCuda(EngineContract):
    pass
