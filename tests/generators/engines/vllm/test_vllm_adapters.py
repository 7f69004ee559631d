"""vLLM with adapters next to their base."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from rollmesh.generators.engines.adapters import AdapterShape
from rollmesh.generators.engines.vllm.engine_args import adapter_arguments
from rollmesh.mesh.errors import ConfigError
from tests.generators.engines.contract_adapters import RANK, AdapterContract
from tests.generators.engines.tiny import ContractModel

if TYPE_CHECKING:
    from tests.generators.engines.vllm.shared import SharedVllm, VllmHarness

pytestmark = [pytest.mark.engine("vllm")]


@pytest.fixture(scope="module")
def adapting(contract_model: ContractModel) -> Iterator[SharedVllm]:
    """A vLLM that takes adapters."""
    from tests.generators.engines.vllm.shared import SharedVllm, VllmHarness, settings

    shared = SharedVllm(contract_model.folder, settings(VllmHarness.slots, adapters=AdapterShape(RANK)))
    yield shared
    shared.close()


class TestAdapters(AdapterContract):
    @pytest.fixture
    def harness(self, contract_model: ContractModel, adapting: SharedVllm) -> Iterator[VllmHarness]:
        from tests.generators.engines.vllm.shared import VllmHarness

        harness = VllmHarness(contract_model, adapting)
        yield harness
        harness.close()

    @pytest.fixture
    def interrupting(self, contract_model: ContractModel, adapting: SharedVllm) -> Iterator[VllmHarness]:
        from tests.generators.engines.vllm.shared import VllmHarness

        harness = VllmHarness(contract_model, adapting, "interrupt")
        yield harness
        harness.close()


def test_a_rank_gets_the_next_one_that_vllm_has() -> None:
    assert [adapter_arguments(rank)["max_lora_rank"] for rank in (1, 8, 17, 512)] == [8, 8, 32, 512]
    with pytest.raises(ConfigError, match="up to rank 512"):
        adapter_arguments(513)
