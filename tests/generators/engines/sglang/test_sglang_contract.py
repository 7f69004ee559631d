"""The `sglang` engine on a real server under the contract of all engines.

The server computes with adapters too, so that one is enough for all tests. Without them it is tested in `make test-all`
and by whole runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.generators.engines.contract import EngineContract
from tests.generators.engines.contract_grammars import GrammarContract
from tests.generators.engines.contract_pauses import PauseContract
from tests.generators.engines.contract_prefixes import PrefixContract
from tests.generators.engines.contract_streams import StreamContract
from tests.generators.engines.contract_swaps import NewKeysContract, SwapContract
from tests.generators.engines.sglang.server import SglangHarness, SharedServer
from tests.generators.engines.tiny import ContractModel

pytestmark = [pytest.mark.engine("sglang")]


@pytest.fixture
def harness(
    request: pytest.FixtureRequest, contract_model: ContractModel, sglang_server: SharedServer
) -> Iterator[SglangHarness]:
    harness = SglangHarness(contract_model, sglang_server, getattr(request, "param", "keep"))
    yield harness
    harness.close()


class TestSglangEngine(EngineContract):
    pass


# An interruption is an abort, and a request with a prefix: the engine's driver does it alike for all backends.
@pytest.mark.parametrize(
    "harness", ["recompute", pytest.param("interrupt", marks=pytest.mark.exhaustive)], indirect=True
)
class TestSglangWithNewKeys(NewKeysContract):
    pass


@pytest.mark.exhaustive
@pytest.mark.parametrize("harness", ["recompute", "interrupt"], indirect=True)
class TestSglangWithNewKeysInFull(SwapContract, PrefixContract, StreamContract, GrammarContract, PauseContract):
    pass


@pytest.mark.exhaustive
class TestSglangWithoutAdapters(EngineContract):
    @pytest.fixture(scope="class")
    def sglang_server(self, contract_model: ContractModel) -> Iterator[SharedServer]:
        server = SharedServer(contract_model.folder)
        yield server
        server.close()
