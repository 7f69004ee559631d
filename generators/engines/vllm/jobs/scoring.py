"""Log-probs of given tokens: a job whose prompt is scored."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from vllm.exceptions import VLLMError
from vllm.inputs.engine import tokens_input

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.served_adapters import LiveAdapter
from rollmesh.generators.engines.vllm.jobs import sampling
from rollmesh.generators.engines.vllm.jobs.running_jobs import lora_request
from rollmesh.generators.engines.vllm.running_engine import RunningEngine


async def log_probs(
    engine: RunningEngine, token_ids: Sequence[int], adapter: LiveAdapter | None
) -> NDArray[np.float32]:
    """See `Backend.log_probs`.

    Args:
        engine: that runs them.
        token_ids: at least two.
        adapter: under which they are scored; None: under the weights alone.
    """
    name = f"probe-{time.monotonic_ns()}"
    ids = list(token_ids)
    # A prompt that fills the context leaves no room for the token that vLLM has to sample.
    full = len(ids) == engine.llm.model_config.max_model_len
    parameters = sampling.scoring(ids[-1] if full else None)
    rendered = tokens_input(ids[:-1] if full else ids)

    async def run() -> list[float]:
        async for output in engine.llm.generate(rendered, parameters, name, lora_request=lora_request(adapter)):
            scored = output.prompt_logprobs or []
            # No entry for the first token, and the given token's own in every other.
            rows = [row[token].logprob for row, token in zip(scored[1:], ids[1:], strict=False) if row]
            last = output.outputs[0].logprobs
            return [*rows, last[0][ids[-1]].logprob] if full and last else rows
        return []

    try:
        found = await engine.answer(run())
    except (ValueError, TypeError, VLLMError) as error:
        raise EngineError(f"vLLM does not score these tokens: {error}") from error
    if len(found) != len(ids) - 1:
        raise EngineError(f"vLLM scored {len(found)} of {len(ids) - 1} tokens")
    return np.asarray(found, np.float32)
