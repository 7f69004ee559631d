"""The SGLang server that all contenders share: two that wait in a loop for work would slow each other down."""

from __future__ import annotations

import asyncio
import time
from multiprocessing.connection import Connection

import aiohttp

from benchmarks.engines.plan import Plan
from benchmarks.engines.worker_process import MeasurementError, requests
from rollmesh.generators.engines.external.model_info import read_folder
from rollmesh.generators.engines.sglang import server_args
from rollmesh.generators.engines.sglang.server_process import ServerProcess, free_port
from rollmesh.mesh.config.rollout import SglangSection

_START_S = 400.0


def serve(pipe: Connection, plan: Plan) -> None:
    """Starts it as our engine does, with the weights of the model folder; sends its address and ends with the pipe."""
    asyncio.run(_serve(pipe, plan))


async def _serve(pipe: Connection, plan: Plan) -> None:
    section = SglangSection(python=plan.python)
    limits = read_folder(plan.model, plan.context).limits
    process, port = ServerProcess(), free_port()
    address = f"http://127.0.0.1:{port}"
    command = server_args.command(
        plan.model, plan.settings(), section, port=port, context=limits.context, vocabulary=limits.vocabulary
    )
    command[command.index("--load-format") + 1] = "auto"
    await process.start(command, server_args.environment(plan.settings()))
    try:
        deadline = time.monotonic() + _START_S
        async with aiohttp.ClientSession(address) as session:
            while not await _answers(session):
                if time.monotonic() > deadline:
                    raise MeasurementError(f"the SGLang server did not come up:\n{process.tail()}")
                await asyncio.sleep(0.25)
        pipe.send(address)
        await asyncio.to_thread(list, requests(pipe))
    finally:
        await process.stop()


async def _answers(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("/model_info", timeout=aiohttp.ClientTimeout(total=5)) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
