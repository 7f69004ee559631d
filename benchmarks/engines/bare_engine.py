"""The engines as their own users drive them: one task per request, log-probs on, nothing of this project between.

`delta`: tokens as they come; `final`: each response as a whole.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.engines.plan import Arrival, Plan
from benchmarks.engines.worker_process import requests
from rollmesh.generators.engines.external.model_info import read_folder
from rollmesh.generators.engines.types import SamplingParams

# Name, prompt, tokens, and how its tokens are to come.
Respond = Callable[[str, tuple[int, ...], int, str], Awaitable[Arrival]]


def vllm(pipe: Connection, plan: Plan) -> None:
    """vLLM's AsyncLLM in this process, with the settings that our engine gives it."""
    uvloop.run(_vllm(pipe, plan))


async def _vllm(pipe: Connection, plan: Plan) -> None:
    from rollmesh.generators.engines.vllm import environment
    from rollmesh.generators.engines.vllm.engine_args import engine_arguments

    settings = plan.settings()
    environment.prepare(settings)
    from vllm import AsyncEngineArgs, TokensPrompt
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollmesh.generators.engines.vllm.jobs.sampling import to_vllm

    arguments = engine_arguments(plan.model, settings, context=plan.context, tokenizer=True)
    del arguments["weight_transfer_config"]
    engine = await asyncio.to_thread(AsyncLLM.from_engine_args, AsyncEngineArgs(**arguments | {"load_format": "auto"}))
    eos = read_folder(plan.model, plan.context).limits.eos
    kinds = {"delta": RequestOutputKind.DELTA, "final": RequestOutputKind.FINAL_ONLY}

    async def respond(name: str, prompt: tuple[int, ...], length: int, kind: str) -> Arrival:
        parameters = to_vllm(SamplingParams(max_tokens=length), eos)
        parameters.output_kind = kinds[kind]
        ids: list[int] = []
        log_probs: list[float] = []
        async for output in engine.generate(TokensPrompt(prompt_token_ids=list(prompt)), parameters, name):
            [part] = output.outputs
            ids += part.token_ids
            log_probs += [row[token].logprob for row, token in zip(part.logprobs, part.token_ids, strict=True)]
        assert len(ids) == len(log_probs) == length
        return Arrival(time.perf_counter(), 1, length)

    try:
        await _answer(pipe, plan, respond)
    finally:
        engine.shutdown()


def sglang(pipe: Connection, plan: Plan) -> None:
    """A client of the SGLang server at `plan.address`, as it is written in an afternoon."""
    uvloop.run(_sglang(pipe, plan))


async def _sglang(pipe: Connection, plan: Plan) -> None:
    import aiohttp

    from rollmesh.generators.engines.sglang import request_bodies as bodies

    eos = sorted(read_folder(plan.model, plan.context).limits.eos)
    # The server closes connections that were idle for 5 s.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    session = aiohttp.ClientSession(plan.address, connector=connector, timeout=aiohttp.ClientTimeout(total=600))

    async def respond(name: str, prompt: tuple[int, ...], length: int, kind: str) -> Arrival:
        body = bodies.generate(
            name,
            prompt,
            SamplingParams(max_tokens=length),
            max_tokens=length,
            eos=eos,
            cache_key="direct",
            mask_tokens=0,
        )
        body["stream"] = kind == "delta"
        ids: list[int] = []
        log_probs: list[float] = []

        def add_answer(answer: dict[str, Any]) -> None:
            ids.extend(answer["output_ids"])
            log_probs.extend(entry[0] for entry in answer["meta_info"]["output_token_logprobs"])

        async with session.post("/generate", json=body) as response:
            if kind == "final":
                add_answer(json.loads(await response.read()))
            else:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        add_answer(json.loads(line[6:]))
        assert len(ids) == len(log_probs) == length
        return Arrival(time.perf_counter(), 1, length)

    async with session:
        await _answer(pipe, plan, respond)


async def _answer(pipe: Connection, plan: Plan, respond: Respond) -> None:
    """Answers what is asked for, each time all responses at once, until no request is left."""
    await respond("warm-up", plan.prompts[0], 8, "delta")
    pipe.send("ready")
    loop = asyncio.get_running_loop()
    questions = iter(requests(pipe))
    while (asked := await loop.run_in_executor(None, next, questions, None)) is not None:
        name, kind, groups = asked
        asked_for = replace(plan, groups=groups)
        responses = (
            respond(f"{name}.{index}.{member}.", *asked_for.group(index), kind)
            for index in range(groups)
            for member in range(plan.n)
        )
        pipe.send(await asyncio.gather(*responses))


ROLES = {"vllm": vllm, "sglang": sglang}
