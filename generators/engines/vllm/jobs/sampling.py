"""Sampling parameters of a job as vLLM's."""

from __future__ import annotations

from collections.abc import Iterable

from vllm import SamplingParams as VllmSampling
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from rollmesh.generators.engines.types import SamplingParams


def to_vllm(sampling: SamplingParams, eos: Iterable[int]) -> VllmSampling:
    """The parameters of one job.

    Args:
        sampling: of the job.
        eos: tokens that end a response; the model's own are left out, so that these alone do.

    Raises:
        ValueError: vLLM does not take them (a temperature above 2); each of its processes checks it.
    """
    return VllmSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed or None,
        stop=list(sampling.stop) or None,
        include_stop_str_in_output=bool(sampling.stop),
        detokenize=bool(sampling.stop),
        stop_token_ids=sorted(eos),
        ignore_eos=True,
        # The log-prob of the sampled token alone.
        logprobs=0,
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(grammar=sampling.grammar) if sampling.grammar else None,
    )


def scoring(next_token: int | None) -> VllmSampling:
    """Parameters for the log-probs of given tokens at temperature 1, never from the prefix cache.

    Args:
        next_token: the token after the prompt, if its log-prob is needed too.
    """
    return VllmSampling(
        temperature=1.0,
        max_tokens=1,
        prompt_logprobs=0,
        logprob_token_ids=None if next_token is None else [next_token],
        ignore_eos=True,
        detokenize=False,
        skip_reading_prefix_cache=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
