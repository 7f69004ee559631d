"""Whether a request can be served; decided before it is queued."""

from __future__ import annotations

import math
from collections.abc import Sequence

from generators.engines.base import GenerationRequest, SampledTokens
from generators.engines.hf.loading import LoadedModel
from mesh.errors import PayloadError


def check_request(request: GenerationRequest, loaded: LoadedModel) -> None:
    """Refuses what the engine cannot serve.

    Raises:
        PayloadError: naming the field, its value and the limit.
    """
    length, context = len(request.prompt_ids), loaded.context
    if length == 0:
        raise PayloadError("prompt_ids", f"request {request.request_id!r} has an empty prompt")
    if length >= context:
        raise PayloadError(
            "prompt_ids",
            f"request {request.request_id!r} has {length} prompt tokens; the model's context of {context} leaves "
            "no room for a response",
            hint="lower rollout.max_prompt_tokens",
        )
    vocabulary = int(loaded.model.config.get_text_config().vocab_size)
    _check_ids("prompt_ids", min(request.prompt_ids), max(request.prompt_ids), vocabulary)
    _check_sampling(request, loaded)
    if request.prefix is not None:
        _check_prefix(request, request.prefix, context - length, vocabulary)


def check_tokens(token_ids: Sequence[int], loaded: LoadedModel) -> None:
    """Refuses tokens that cannot be run through the model for their log-probs.

    Raises:
        PayloadError: naming the limit.
    """
    if not 2 <= len(token_ids) <= loaded.context:
        raise PayloadError("token_ids", f"{len(token_ids)} tokens; 2 to {loaded.context} are possible")
    _check_ids("token_ids", min(token_ids), max(token_ids), int(loaded.model.config.get_text_config().vocab_size))


def _check_ids(field: str, lowest: int, highest: int, vocabulary: int) -> None:
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        raise PayloadError(field, f"token id {wrong} is outside the vocabulary of {vocabulary}")


def _check_sampling(request: GenerationRequest, loaded: LoadedModel) -> None:
    sampling = request.sampling
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise PayloadError("sampling.temperature", f"{sampling.temperature} is not a number >= 0")
    if not 0 < sampling.top_p <= 1:
        raise PayloadError("sampling.top_p", f"{sampling.top_p} is not in (0, 1]")
    if sampling.top_k < 0:
        raise PayloadError("sampling.top_k", f"{sampling.top_k} is negative; 0 turns it off")
    if sampling.max_tokens < 1:
        raise PayloadError("sampling.max_tokens", f"{sampling.max_tokens} is below 1")
    if not 0 <= sampling.seed < 2**64:
        raise PayloadError("sampling.seed", f"{sampling.seed} is not a 64-bit unsigned number")
    if any(not text for text in sampling.stop):
        raise PayloadError("sampling.stop", "an empty stop string would end every response at once")
    if sampling.stop and loaded.tokenizer is None:
        raise PayloadError("sampling.stop", "stop strings need a tokenizer, and the model folder has none")


def _check_prefix(request: GenerationRequest, prefix: SampledTokens, room: int, vocabulary: int) -> None:
    count = len(prefix)
    if request.pinned:
        raise PayloadError("prefix", "a pinned request is answered by one version and takes no tokens of others")
    if count == 0:
        raise PayloadError("prefix", "no tokens: leave it out")
    if len(prefix.log_probs) != count or len(prefix.versions) != count:
        raise PayloadError(
            "prefix", f"{count} tokens, {len(prefix.log_probs)} log-probs and {len(prefix.versions)} versions"
        )
    if count > min(request.sampling.max_tokens, room):
        raise PayloadError(
            "prefix", f"{count} tokens are more than max_tokens {request.sampling.max_tokens} or the room for {room}"
        )
    _check_ids("prefix", int(prefix.response_ids.min()), int(prefix.response_ids.max()), vocabulary)
