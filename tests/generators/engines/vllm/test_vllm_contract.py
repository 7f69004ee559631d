"""Real vLLM under the contract of all engines, with each KV policy where it matters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.generators.engines.contract import EngineContract
from tests.generators.engines.contract_pauses import PauseContract
from tests.generators.engines.contract_prefixes import PrefixContract
from tests.generators.engines.contract_streams import StreamContract
from tests.generators.engines.contract_swaps import NewKeysContract, SwapContract
from tests.generators.engines.harness import EngineHarness
from tests.generators.engines.tiny import ContractModel

if TYPE_CHECKING:
    from tests.generators.engines.vllm.shared import SharedVllm

pytestmark = [pytest.mark.engine("vllm")]


@pytest.fixture
def harness(request: pytest.FixtureRequest, contract_model: ContractModel, vllm: SharedVllm) -> Iterator[EngineHarness]:
    from tests.generators.engines.vllm.shared import VllmHarness

    harness = VllmHarness(contract_model, vllm, getattr(request, "param", "keep"))
    yield harness
    harness.close()


class TestVllmEngine(EngineContract):
    pass


# An interruption is an abort, and a request with a prefix: the engine's driver does it alike for all backends.
@pytest.mark.parametrize(
    "harness", ["recompute", pytest.param("interrupt", marks=pytest.mark.exhaustive)], indirect=True
)
class TestVllmWithNewKeys(NewKeysContract):
    pass


@pytest.mark.exhaustive
@pytest.mark.parametrize("harness", ["recompute", "interrupt"], indirect=True)
class TestVllmWithNewKeysInFull(SwapContract, PrefixContract, StreamContract, PauseContract):
    pass
