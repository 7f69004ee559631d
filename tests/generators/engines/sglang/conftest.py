"""The session's SGLang server; it starts with the first test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.generators.engines.contract_adapters import RANK
from tests.generators.engines.sglang.server import SharedServer
from tests.generators.engines.tiny import ContractModel


@pytest.fixture(scope="session")
def sglang_server(contract_model: ContractModel) -> Iterator[SharedServer]:
    """A real server on this machine's CPU, which takes whole weights and adapters."""
    server = SharedServer(contract_model.folder, rank=RANK)
    yield server
    server.close()
