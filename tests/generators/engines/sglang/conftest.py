"""The session's SGLang server; it starts with the first test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.generators.engines.sglang.server import CONTEXT, SharedServer
from tests.generators.engines.tiny import ContractModel


@pytest.fixture(scope="session")
def contract_model(tmp_path_factory: pytest.TempPathFactory) -> ContractModel:
    """The model of the contract's tests, for longer sequences."""
    torch.set_num_threads(1)
    return ContractModel(tmp_path_factory.mktemp("contract-model"), CONTEXT)


@pytest.fixture(scope="session")
def sglang_server(contract_model: ContractModel) -> Iterator[SharedServer]:
    """A real server on this machine's CPU."""
    server = SharedServer(contract_model.folder)
    yield server
    server.close()
