"""Checks of requests, the same for every engine, before they are queued."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollmesh.generators.engines.types import GenerationRequest, SamplingParams
from rollmesh.mesh.config.base import LEAST_TEMPERATURE
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.images import ImageProcessor, check_seen
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.seeds import SEEDS

# Seeds are below: engines keep them as signed 64-bit numbers.
# Counts of tokens are below: engines keep them as signed 32-bit numbers.
_COUNTS = 2**31


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of a model's requests.

    Attributes:
        context: tokens of prompt and response together.
        vocabulary: token ids are below this.
        eos: token ids that end a response.
        text: it has a tokenizer, so that stop strings can be found.
        images: it takes images.
    """

    context: int
    vocabulary: int
    eos: frozenset[int]
    text: bool = True
    images: bool = False


def expand_images(
    requests: Sequence[GenerationRequest], images: ImageProcessor, limits: RequestLimits
) -> list[GenerationRequest | PayloadError]:
    """Requests with their prompts' tokens as the model sees them, or why one cannot be served; no place for a loop."""
    return [_with_image_tokens(request, images, limits) for request in requests]


def _with_image_tokens(
    request: GenerationRequest, images: ImageProcessor, limits: RequestLimits
) -> GenerationRequest | PayloadError:
    try:
        own_prompt = _own_prompt(request)
        seen = images.widened(own_prompt, request.images)
        check_seen(seen, request.seen)
        expanded = replace(request, prompt_ids=[*seen, *request.prompt_ids[len(own_prompt) :]])
        check_request(expanded, limits)
    except PayloadError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a processor is the model's own code, and may raise anything
        return PayloadError("images", f"the model's processor fails at them: {type(error).__name__}: {error}")
    return expanded


def _own_prompt(request: GenerationRequest) -> Sequence[int]:
    """The prompt without earlier turns, which has the images."""
    return request.prompt_ids[: len(request.prompt_ids) - request.earlier]


def check_request(request: GenerationRequest, limits: RequestLimits, images: ImageProcessor | None = None) -> None:
    """Refuses requests that an engine cannot serve; reads no image, so that it is quick.

    Args:
        request: its prompt as it was submitted, or widened.
        limits: of the model.
        images: counts the places of images in a prompt as it was submitted.

    Raises:
        PayloadError: naming the field, its value and the limit.
    """
    length, context = len(request.prompt_ids), limits.context
    if request.images and not limits.images:
        raise PayloadError("images", f"request {request.request_id!r} has images; text alone is taken here")
    if images is not None:
        images.check_places(_own_prompt(request), request.images)
    if length == 0:
        raise PayloadError("prompt_ids", f"request {request.request_id!r} has an empty prompt")
    if length >= context:
        raise PayloadError(
            "prompt_ids",
            f"request {request.request_id!r} has {length} prompt tokens, and prompt and response may have {context} "
            "together: no room is left for a response",
            hint="lower rollout.max_prompt_tokens",
        )
    _check_ids("prompt_ids", min(request.prompt_ids), max(request.prompt_ids), limits)
    _check_sampling(request.sampling, limits)
    if request.prefix is not None:
        _check_prefix(request, request.prefix, limits)


def check_tokens(token_ids: Sequence[int], limits: RequestLimits) -> None:
    """Refuses tokens that cannot be run through the model.

    Raises:
        PayloadError: naming the limit.
    """
    if not 2 <= len(token_ids) <= limits.context:
        raise PayloadError("token_ids", f"{len(token_ids)} tokens; 2 to {limits.context} are possible")
    _check_ids("token_ids", min(token_ids), max(token_ids), limits)


def _check_ids(field: str, lowest: int, highest: int, limits: RequestLimits) -> None:
    if lowest < 0 or highest >= limits.vocabulary:
        wrong = lowest if lowest < 0 else highest
        raise PayloadError(field, f"token id {wrong} is outside the vocabulary of {limits.vocabulary}")


def _check_sampling(sampling: SamplingParams, limits: RequestLimits) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise PayloadError("sampling.temperature", f"{sampling.temperature} is not a number >= 0")
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise PayloadError("sampling.temperature", f"{sampling.temperature} is below {LEAST_TEMPERATURE}; 0 is greedy")
    if not 0 < sampling.top_p <= 1:
        raise PayloadError("sampling.top_p", f"{sampling.top_p} is not in (0, 1]")
    if not 0 <= sampling.top_k < _COUNTS:
        raise PayloadError("sampling.top_k", f"{sampling.top_k} is not in [0, 2**31); 0 turns it off")
    if not 1 <= sampling.max_tokens < _COUNTS:
        raise PayloadError("sampling.max_tokens", f"{sampling.max_tokens} is not in [1, 2**31)")
    if not 0 <= sampling.seed < SEEDS:
        raise PayloadError("sampling.seed", f"{sampling.seed} is not in [0, 2**63)")
    if any(not text for text in sampling.stop):
        raise PayloadError("sampling.stop", "an empty stop string would end every response at once")
    if sampling.stop and not limits.text:
        raise PayloadError("sampling.stop", "stop strings need a tokenizer, and the model folder has none")
    if sampling.grammar and not limits.text:
        raise PayloadError("sampling.grammar", "a grammar needs a tokenizer, and the model folder has none")


def _check_prefix(request: GenerationRequest, prefix: Trajectory, limits: RequestLimits) -> None:
    count, room = len(prefix), limits.context - len(request.prompt_ids)
    if request.pinned:
        raise PayloadError("prefix", "a pinned request is answered by one version and takes no tokens of others")
    if count == 0:
        raise PayloadError("prefix", "no tokens: leave it out")
    if len(prefix.log_probs) != count or len(prefix.versions) != count:
        raise PayloadError(
            "prefix", f"{count} tokens, {len(prefix.log_probs)} log-probs and {len(prefix.versions)} versions"
        )
    if len(prefix.response_mask) != count:
        raise PayloadError("prefix", f"{count} tokens and a mask over {len(prefix.response_mask)}")
    if count > min(request.sampling.max_tokens, room):
        raise PayloadError(
            "prefix", f"{count} tokens are more than max_tokens {request.sampling.max_tokens} or the room for {room}"
        )
    _check_ids("prefix", int(prefix.response_ids.min()), int(prefix.response_ids.max()), limits)
