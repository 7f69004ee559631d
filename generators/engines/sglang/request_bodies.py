"""Bodies of requests to the server, for one stretch of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmesh.generators.engines.types import SamplingParams

# SGLang reports the kept set of two tokens at least; one is greedy.
_ONE = 1


def is_filtered(sampling: SamplingParams) -> bool:
    """True where tokens are drawn from less than the whole distribution, so that log-probs are of the kept set."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def generate(
    rid: str,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    max_tokens: int,
    eos: Sequence[int],
    cache_key: str,
    mask_tokens: int,
    adapter: str | None,
) -> dict[str, Any]:
    """Body of a streamed /generate.

    Args:
        rid: name of the request; no other request's name begins with it.
        token_ids: all tokens before the first one to be sampled.
        sampling: `stop` is not sent: the server has no tokenizer.
        max_tokens: to be sampled.
        eos: token ids that end it.
        cache_key: only requests with the same one share KV caches.
        mask_tokens: most tokens of a kept set that the server reports. A larger one is cut to them.
        adapter: name of the adapter to compute with; None: the base alone.
    """
    parameters: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(eos),
    }
    body = {
        "rid": rid,
        "input_ids": list(token_ids),
        "sampling_params": parameters,
        "stream": True,
        "return_logprob": True,
        "logprob_start_len": -1,
        "extra_key": cache_key,
    }
    if sampling.grammar:
        # Its name for texts of both forms.
        parameters["ebnf"] = sampling.grammar
    if adapter is not None:
        body["lora_path"] = adapter
    if is_filtered(sampling):
        kept = sampling.top_k or mask_tokens
        parameters["top_p"] = sampling.top_p
        parameters["top_k"] = kept if kept <= _ONE else min(kept, mask_tokens)
        body["return_sampling_mask"] = True
        body["sampling_logprobs_mode"] = "selected"
    return body


def log_probs(token_ids: Sequence[int], cache_key: str, adapter: str | None) -> dict[str, Any]:
    """Body of a /generate that samples nothing and gives the log-probs of its input, at temperature 1."""
    return {
        "lora_path": adapter,
        "input_ids": list(token_ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "extra_key": cache_key,
    }
