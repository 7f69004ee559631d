"""The probe under the first weights: the engine computes what transformers computes, or the model is refused.

The reference is each of two sequences alone, through transformers' eager attention and without a cache. The engine
prefills both in one padded batch, then decodes them in one batch at positions of their own, with its own masks. Windows
are shortened meanwhile, so that short sequences show their effect.

Invariant: the model is as before; torch's random numbers are not drawn from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from rollmesh.generators.engines.errors import EngineSettingsError
from rollmesh.generators.engines.hf.kv_budget import COLUMNS, Shape
from rollmesh.generators.engines.hf.kv_cache import SlotCache
from rollmesh.generators.engines.hf.model.attention_masks import MaskBuilder
from rollmesh.generators.engines.hf.model.loading import LoadedModel
from rollmesh.generators.engines.hf.model.prefill import Prefiller
from rollmesh.generators.engines.hf.model.served_layers import ELSEWHERE
from rollmesh.generators.engines.hf.model.traced_forward import ForwardPass

# Tokens of the longest sequence, and how many of them are decoded.
_LONGEST, _STEPS = 15, 4
# Tokens of a window, and of the other limits of attention: fewer than the sequences have.
_WINDOW = 4
_WINDOWS = ("window", "window_size", "window_len", "index_topk")
_SEED = 20
# Beyond which special tokens stand, those of images among them.
_ORDINARY = 1000
# Tolerances of log-probs, relative to their spread and absolute; rounding makes up to 5e-6 of the spread in float32.
_EXACT = (1e-3, 1e-5)
_ROUNDED = (0.1, 1e-2)
# In lower precision as many roundings of the embeddings as the whole model may make.
_ROUNDINGS = 6.0
_ROUNDING = 2.0**-9


def probe(loaded: LoadedModel, forward_pass: ForwardPass) -> None:
    """Compares a model's log-probs in this engine with those in transformers.

    Args:
        loaded: the model, with real weights.
        forward_pass: of its decode steps.

    Raises:
        EngineSettingsError: they differ.
    """
    model = loaded.model
    longest = min(_LONGEST, loaded.context)
    rng = np.random.default_rng(_SEED)
    vocabulary = min(int(model.config.get_text_config().vocab_size), _ORDINARY)
    sequences = [rng.integers(0, vocabulary, length).tolist() for length in (max(1 + _STEPS, longest // 2), longest)]
    if longest < len(sequences[0]):
        return
    with _short_windows(model):
        reference = _reference_log_probs(model, sequences)
        if not reference.isfinite().any():
            # Weights that say nothing prove nothing.
            return
        spread = reference[reference.isfinite()].std()
        relative, absolute = _EXACT if model.dtype == torch.float32 else _ROUNDED
        most = relative * spread + absolute
        difference = _rms_difference(_engine_log_probs(loaded, forward_pass, sequences), reference)
        if model.dtype != torch.float32 and not difference <= most:
            most = torch.maximum(most, _ROUNDINGS * _noise(model, sequences, reference))
    # Written so that NaN is a difference.
    if not difference <= most:
        raise EngineSettingsError(
            f"{model.config.model_type} cannot be served right by rollout.engine: hf: log-probs of random tokens "
            f"differ from those of transformers' eager attention by {float(difference):.2g} "
            f"(at most {float(most):.2g})",
            hint=ELSEWHERE,
        )


@contextmanager
def model_errors_named(model: PreTrainedModel) -> Iterator[None]:
    """Turns errors of a model's own code, as it runs for the first time, into one that names the model.

    Raises:
        EngineSettingsError: naming it.
    """
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, AssertionError, NotImplementedError) as error:
        raise EngineSettingsError(
            f"{model.config.model_type} cannot be served by rollout.engine: hf: {type(error).__name__}: {error}",
            hint=ELSEWHERE,
        ) from error


def _reference_log_probs(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Log-probs, float32 [sequences, steps + 1, vocabulary], after the prompt and each token that is decoded."""
    former = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        logits = [
            model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, -_STEPS - 1 :]
            for ids in sequences
        ]
    finally:
        model.set_attn_implementation(former)
    return torch.stack(logits).float().log_softmax(-1)


def _engine_log_probs(
    loaded: LoadedModel, forward_pass: ForwardPass, sequences: Sequence[Sequence[int]]
) -> torch.Tensor:
    """The same log-probs as `_reference_log_probs`, computed by this engine."""
    model, device = loaded.model, loaded.model.device
    window = None if loaded.window is None else min(loaded.window, _WINDOW)
    masks = MaskBuilder(loaded.layer_types, window, model.dtype, device)
    prefixes = Prefiller(model, len(loaded.layer_types), masks).run([ids[:-_STEPS] for ids in sequences])
    cache = SlotCache(Shape(len(sequences), COLUMNS), loaded.layer_types, device)
    for row, (batch, member) in enumerate(prefixes):
        cache.store(torch.tensor([row], device=device), batch.cache, torch.tensor([member], device=device))
    logits = [torch.stack([batch.logits[member] for batch, member in prefixes])]
    for remaining in range(_STEPS, 0, -1):
        positions = torch.tensor([len(ids) - remaining for ids in sequences], device=device)
        columns = len(sequences[-1]) - remaining + 1
        tokens = torch.tensor([[ids[-remaining]] for ids in sequences], device=device)
        cache.begin(positions, columns)
        logits.append(forward_pass(tokens, positions[:, None], masks.decode(positions, columns), cache))
    return torch.stack(logits, dim=1).float().log_softmax(-1)


def _noise(model: PreTrainedModel, sequences: Sequence[Sequence[int]], reference: torch.Tensor) -> torch.Tensor:
    """The change of the reference by one more rounding of the embeddings."""
    generator = torch.Generator()

    def rounded(_module: torch.nn.Module, _args: object, hidden: torch.Tensor) -> torch.Tensor:
        generator.manual_seed(_SEED)
        by = 1.0 + _ROUNDING * torch.randn(hidden.shape, generator=generator).to(hidden.device)
        return (hidden.float() * by).to(hidden.dtype)

    handle = model.get_input_embeddings().register_forward_hook(rounded)
    try:
        return _rms_difference(_reference_log_probs(model, sequences), reference)
    finally:
        handle.remove()


def _rms_difference(ours: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Root mean square of the differences where the reference is finite, nats."""
    finite = reference.isfinite()
    return (ours[finite] - reference[finite]).square().mean().sqrt()


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    owners = [model.config.get_text_config(), *model.modules()]
    windows = [
        (owner, name, value)
        for owner in owners
        for name, value in vars(owner).items()
        if name.endswith(_WINDOWS) and type(value) is int and value > _WINDOW
    ]
    for owner, name, _ in windows:
        setattr(owner, name, _WINDOW)
    try:
        yield
    finally:
        for owner, name, value in windows:
            setattr(owner, name, value)
