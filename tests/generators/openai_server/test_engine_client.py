"""Callers of the engine: what they leave unfinished is aborted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from rollmesh.generators.engines.types import GenerationRequest, GenerationResult, SamplingParams
from rollmesh.generators.openai_server.engine_client import EngineClient
from rollmesh.mesh.trajectory.payload_codec import Trajectory


async def test_only_what_has_no_result_is_aborted_when_its_caller_leaves() -> None:
    aborted: list[str] = []
    engine: Any = SimpleNamespace(submit=lambda _requests: None, abort=aborted.extend)
    client = EngineClient(engine)
    ended, left = (GenerationRequest(client.new_id(), np.ones(1, np.int32), SamplingParams()) for _ in range(2))
    result = GenerationResult(ended.request_id, Trajectory.empty(), "stop")
    async with client.open([ended, left]) as queue:
        assert client.accept_results([result]) == []
        assert queue.get_nowait() is result
        assert not aborted
    assert aborted == [left.request_id]
    assert client.running == 0
