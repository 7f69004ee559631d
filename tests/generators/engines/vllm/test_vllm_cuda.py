"""Real vLLM on CUDA under the contract of all engines: each way of the weights, with one device and with two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from rollmesh.generators.engines.types import KvPolicy
from tests.generators.engines.contract import EngineContract
from tests.generators.engines.harness import EngineHarness
from tests.generators.engines.tiny import ContractModel

if TYPE_CHECKING:
    from tests.generators.engines.vllm.shared import SharedVllm

pytestmark = [pytest.mark.engine("vllm"), pytest.mark.gpu, pytest.mark.timeout(1800)]

_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
# Policies take turns: what they do apart from the weights is tested on a CPU.
_CASES = [
    pytest.param(("keep", {"transfer": "ipc"}), id="ipc"),
    pytest.param(("recompute", {"transfer": "shm"}), id="shm"),
    pytest.param(("interrupt", {"transfer": "nccl"}), id="nccl", marks=_TWO),
    pytest.param(("keep", {"tensor_parallel": 2}), id="two workers", marks=_TWO),
    pytest.param(("recompute", {"data_parallel": 2}), id="two copies", marks=_TWO),
]


class TestVllmOnCuda(EngineContract):
    @pytest.fixture(scope="class", params=_CASES)
    def started(
        self, request: pytest.FixtureRequest, contract_model: ContractModel
    ) -> Iterator[tuple[KvPolicy, SharedVllm]]:
        from rollmesh.generators.engines.vllm import native_transfer
        from tests.generators.engines.vllm.shared import SharedVllm, VllmHarness, settings

        kv, section = request.param
        with pytest.MonkeyPatch.context() as patched:
            # Most tensors of the tiny model are above it, and a set takes several buffers.
            patched.setattr(native_transfer, "_PACK_BYTES", 4096)
            shared = SharedVllm(contract_model.folder, settings(VllmHarness.slots, kv, "cuda", **section))
            yield kv, shared
            shared.close()

    @pytest.fixture
    def harness(self, contract_model: ContractModel, started: tuple[KvPolicy, SharedVllm]) -> Iterator[EngineHarness]:
        from tests.generators.engines.vllm.shared import VllmHarness

        class OnCuda(VllmHarness):
            sleep_frees = True
            # Kernels of attention multiply in TF32.
            tolerance = 3e-2

        harness = OnCuda(contract_model, started[1], started[0])
        yield harness
        harness.close()
