"""SGLang with adapters next to their base."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.generators.engines.contract_adapters import RANK, AdapterCase, AdapterContract
from tests.generators.engines.sglang.server import SglangHarness, SharedServer
from tests.generators.engines.tiny import ContractModel

pytestmark = [pytest.mark.engine("sglang"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def adapting(contract_model: ContractModel) -> Iterator[SharedServer]:
    """A server that takes adapters."""
    server = SharedServer(contract_model.folder, rank=RANK)
    yield server
    server.close()


class TestAdapters(AdapterContract):
    @pytest.fixture
    def harness(self, contract_model: ContractModel, adapting: SharedServer) -> Iterator[SglangHarness]:
        harness = SglangHarness(contract_model, adapting, "keep", rank=RANK)
        yield harness
        harness.close()

    @pytest.fixture
    def interrupting(self, contract_model: ContractModel, adapting: SharedServer) -> Iterator[SglangHarness]:
        harness = SglangHarness(contract_model, adapting, "interrupt", rank=RANK)
        yield harness
        harness.close()

    def test_earlier_adapters_leave_the_server(
        self, harness: SglangHarness, versions: Iterator[PolicyVersion], adapting: SharedServer
    ) -> None:
        case = AdapterCase(harness)
        for seed in range(3):
            self.update(harness, next(versions), case.adapter(seed))
        # A pause waits for them.
        harness.engine.pause().result(harness.deadline_s)
        live = harness.engine._backend._adapters.newest  # type: ignore[attr-defined] # of a driven engine
        assert adapting.adapters() == {live.name}
