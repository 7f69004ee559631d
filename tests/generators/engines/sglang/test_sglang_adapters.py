"""SGLang with adapters next to their base."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.generators.engines.contract_adapters import RANK, AdapterCase, AdapterContract
from tests.generators.engines.sglang.server import SglangHarness, SharedServer
from tests.generators.engines.tiny import ContractModel

pytestmark = [pytest.mark.engine("sglang")]


class TestAdapters(AdapterContract):
    @pytest.fixture
    def harness(self, contract_model: ContractModel, sglang_server: SharedServer) -> Iterator[SglangHarness]:
        harness = SglangHarness(contract_model, sglang_server, "keep", rank=RANK)
        yield harness
        harness.close()

    @pytest.fixture
    def interrupting(self, contract_model: ContractModel, sglang_server: SharedServer) -> Iterator[SglangHarness]:
        harness = SglangHarness(contract_model, sglang_server, "interrupt", rank=RANK)
        yield harness
        harness.close()

    def test_earlier_adapters_leave_the_server(
        self, harness: SglangHarness, versions: Iterator[PolicyVersion], sglang_server: SharedServer
    ) -> None:
        case = AdapterCase(harness)
        for seed in range(3):
            self.update(harness, next(versions), case.adapter(seed))
        # A pause waits for them.
        harness.engine.pause().result(harness.deadline_s)
        live = harness.engine._backend._adapters.newest  # type: ignore[attr-defined] # of a driven engine
        assert sglang_server.adapters() == {live.name}
