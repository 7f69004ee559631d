"""A server that gives its memory back: what is asked of it, in which order."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp.test_utils import TestServer

from generators.engines import create_engine
from generators.engines.base import EngineSettings
from mesh.config.rollout import SglangSection
from tests.generators.engines.collector import DEADLINE_S, Collector
from tests.generators.engines.harness import V1, V2
from tests.generators.engines.sglang.server import CONTEXT
from tests.generators.engines.sglang.stand_in import StandIn
from tests.generators.engines.tiny import ContractModel

_CACHE = ["kv_cache", "cuda_graph"]


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "dropped"])
def test_weights_that_come_while_asleep_have_their_memory_first(keeps: bool, contract_model: ContractModel) -> None:
    """Without it they would be written where nothing is; and what is back must not be asked for again."""
    server = StandIn()
    server.info |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True, "context_length": CONTEXT}
    server.paths += ["/release_memory_occupation", "/resume_memory_occupation"]

    def drive(address: str) -> None:
        section = SglangSection(address=address, transfer="disk")
        engine = create_engine("sglang", contract_model.folder, EngineSettings(sglang=section), Collector())
        engine.start()
        try:
            weights = contract_model.constant_weights(10).items()
            engine.update_weights(V1, weights, "").result(DEADLINE_S)
            engine.sleep(keep_weights=keeps).result(DEADLINE_S)
            engine.update_weights(V2, weights, "").result(DEADLINE_S)
            assert engine.status().state == "asleep"
            engine.wake().result(DEADLINE_S)
        finally:
            engine.stop()

    async def run() -> None:
        async with TestServer(server.application()) as address:
            await asyncio.to_thread(drive, str(address.make_url("/")))

    asyncio.run(run())
    update = ("/update_weights_from_disk", None)
    asked = [(path, body.get("tags")) for path, body in zip(server.asked, server.bodies, strict=True)]
    assert [item for item in asked if item[1] or item == update] == [
        update,
        ("/release_memory_occupation", [*_CACHE, "weights"]),
        ("/resume_memory_occupation", ["weights"]),
        update,
        ("/resume_memory_occupation", _CACHE),
    ]
