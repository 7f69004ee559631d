"""The `sglang` engine on a real server on CUDA under the contract of all engines: each way of the weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rollmesh.generators.engines.types import KvPolicy
from tests.generators.engines.contract import EngineContract
from tests.generators.engines.sglang.server import SglangHarness, SharedServer
from tests.generators.engines.tiny import ContractModel

pytestmark = [pytest.mark.engine("sglang"), pytest.mark.gpu]

_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
# The server has the first device; a broadcast comes from the second. Policies take turns.
_CASES = [
    pytest.param(("keep", "tensor", "cuda", {}), id="tensor"),
    pytest.param(("recompute", "disk", "cuda", {}), id="disk"),
    pytest.param(("interrupt", "distributed", "cuda:1", {}), id="distributed", marks=_TWO),
    pytest.param(("keep", "tensor", "cuda", {"tensor_parallel": 2}), id="two ranks", marks=_TWO),
]


class OnCuda(SglangHarness):
    sleep_frees = True
    # Kernels of attention multiply in TF32.
    tolerance = 3e-2


class TestSglangOnCuda(EngineContract):
    @pytest.fixture(scope="class", params=_CASES)
    def started(
        self, request: pytest.FixtureRequest, contract_model: ContractModel
    ) -> Iterator[tuple[SharedServer, KvPolicy, str, str]]:
        kv, transfer, sender, section = request.param
        # The kernels that take float32.
        options = {"attention-backend": "triton", "sampling-backend": "pytorch"}
        server = SharedServer(contract_model.folder, "cuda", options=options, **section)
        yield server, kv, transfer, sender
        server.close()

    @pytest.fixture
    def harness(
        self, contract_model: ContractModel, started: tuple[SharedServer, KvPolicy, str, str]
    ) -> Iterator[OnCuda]:
        harness = OnCuda(contract_model, *started)
        yield harness
        harness.close()
