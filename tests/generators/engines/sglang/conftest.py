"""The session's SGLang server; it starts with the first test that asks for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from rollmesh.generators.engines.checkpoint_names import CheckpointLayout
from rollmesh.generators.engines.sglang import backend
from rollmesh.generators.engines.sglang.http_client import CALL_S, HttpClient
from tests.generators.engines.contract_adapters import RANK
from tests.generators.engines.sglang.server import SharedServer
from tests.generators.engines.tiny import ContractModel


@pytest.fixture(scope="session")
def sglang_server(contract_model: ContractModel) -> Iterator[SharedServer]:
    """A real server on this machine's CPU, which takes whole weights and adapters."""
    server = SharedServer(contract_model.folder, rank=RANK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HttpClient, "get", _describing_once(server))
        patch.setattr(backend, "CheckpointLayout", _made_once())
        yield server
    server.close()


def _describing_once(server: SharedServer) -> Callable[..., Awaitable[Any]]:
    """`HttpClient.get`, by which each new engine on the server would have it write out its whole interface."""
    get, described = HttpClient.get, []

    async def get_once(client: HttpClient, path: str, timeout_s: float = CALL_S) -> Any:
        if path != "/openapi.json" or not server.is_at(client.address):
            return await get(client, path, timeout_s)
        if not described:
            described.append(await get(client, path))
        return described[0]

    return get_once


def _made_once() -> Callable[[PreTrainedConfig, torch.dtype], CheckpointLayout]:
    """A layout never changes; to make one takes as long as many a test."""
    made: dict[tuple[str, torch.dtype], CheckpointLayout] = {}

    def layout(config: PreTrainedConfig, dtype: torch.dtype) -> CheckpointLayout:
        key = (config.to_json_string(), dtype)
        return made.get(key) or made.setdefault(key, CheckpointLayout(config, dtype))

    return layout
