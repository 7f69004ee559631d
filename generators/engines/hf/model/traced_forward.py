"""The decode step's forward pass, called directly or replayed from a recording.

For small models Python costs more than arithmetic. So the model's own forward pass, through the slot cache, is
recorded once (TorchScript tracing) and replayed without the interpreter. Parameters and storage are inputs of the
recording, so that new weights and grown storage need no new one.

A recording saves about a fifth of the processor time per token of models below a million parameters. At four million it
saves 6 % (`benchmarks.whole_loop.generation_alone`). `torch.compile` needs a C++ compiler, and more than 50 s of
processor time before the first token.

Invariants: a recording is used only where two things hold. (1) No operation of the forward pass lets a Python decision
depend on tensor values, as data-dependent routing would (PyTorch tags such operations). (2) Its logits and the states
it stores equal those of the direct pass, at other batch sizes, lengths and capacities than those recorded. Otherwise
the direct pass serves.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from rollmesh.generators.engines.hf.kv_budget import COLUMNS, Shape
from rollmesh.generators.engines.hf.kv_cache import SlotCache
from rollmesh.generators.engines.hf.model.attention_masks import AttentionMask, MaskBuilder
from rollmesh.generators.engines.hf.model.loading import LoadedModel
from rollmesh.generators.engines.hf.model.prefill import HARMLESS, Prefiller

log = logging.getLogger(__name__)

_VALUE_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
# The tracer's warnings where tensor values leave for Python by ways that are no operations.
_VALUE_WARNINGS = ("Python list", "NumPy array")
_TRIAL_SLOTS = 5
# (rows, first position) of the trials; the last one makes the storage grow.
_RECORDED = (4, 3)
_TRIALS = ((4, 4), (1, 7), (_TRIAL_SLOTS, 20), (2, COLUMNS + 5))


class ForwardPass(Protocol):
    """One decode step of the model."""

    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: AttentionMask, cache: SlotCache
    ) -> torch.Tensor:
        """Logits [rows, vocabulary] for int64 [rows, 1] tokens at int64 [rows, 1] positions; `cache` has begun."""
        ...


class DirectForward:
    """Calls the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: AttentionMask, cache: SlotCache
    ) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        return logits


class TracedForward:
    """Replays a recording.

    Args:
        replay: as made by `_trace`.
    """

    def __init__(self, replay: torch.jit.ScriptModule) -> None:
        self._replay = replay

    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: AttentionMask, cache: SlotCache
    ) -> torch.Tensor:
        # Shapes change with nearly every step: specializing the recording to them would never pay.
        with torch.jit.optimized_execution(False):
            logits: torch.Tensor = self._replay(input_ids, position_ids, *_flatten(mask, cache))
        return logits


class _Recordable(nn.Module):
    """The forward pass as a function of tensors alone; `_flatten` gives their order."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self._cache = cache
        self._kinds = kinds

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        cache, rest = self._cache, list(tensors)
        masks = {kind: rest.pop(0) for kind in self._kinds}
        mask = next(iter(masks.values()))
        # Sizes are taken from tensors: the recording then follows them instead of keeping today's numbers.
        cache.step.rows = input_ids.shape[0]
        cache.step.columns = mask.shape[3]
        cache.step.index = {heads: rest.pop(0) for heads in sorted(cache.step.index)}
        for layer in cache.used_layers:
            layer.keys, layer.values = rest.pop(0), rest.pop(0)
        attention_mask: Any = masks if len(masks) > 1 else mask
        return DirectForward(self.model)(input_ids, position_ids, attention_mask, cache)


class _ValueWatch(TorchDispatchMode):
    """Records operations with results that Python can branch on, or with shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _VALUE_TAGS.intersection(func.tags) and not _indexes_by_number(func, args):
            self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def _indexes_by_number(func: Any, args: Any) -> bool:
    """Indexing is tagged for the sake of boolean masks; with integers its shape does not depend on values."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(index is None or index.dtype in (torch.int32, torch.int64) for index in args[1])


class _Unrecordable(Exception):  # noqa: N818 - not an error: the direct pass serves
    """The reason why a model is not recorded."""


def record(loaded: LoadedModel, masks: MaskBuilder, prefiller: Prefiller) -> ForwardPass:
    """A recording of the model's decode step where one is possible and proven equal, else the direct pass.

    The model must hold real weights: the proof compares logits.
    """
    direct = DirectForward(loaded.model)
    try:
        # Inference mode would hide the operations that compound ones, such as the truth of a tensor, are made of.
        with torch.inference_mode(False), torch.no_grad():
            recorded = _trace(loaded, masks, prefiller)
            _prove(direct, recorded, loaded, masks, prefiller)
    except _Unrecordable as reason:
        log.info("decoding calls the model directly: %s", reason)
        return direct
    return recorded


def _trace(loaded: LoadedModel, masks: MaskBuilder, prefiller: Prefiller) -> TracedForward:
    cache = _trial_cache(loaded, prefiller)
    inputs = _trial(loaded, masks, cache, *_RECORDED)
    with _ValueWatch() as watch:
        DirectForward(loaded.model)(*inputs, cache)
    if watch.seen:
        raise _Unrecordable(f"its forward pass looks at values ({', '.join(sorted(watch.seen))})")
    input_ids, position_ids, mask = inputs
    kinds = tuple(mask) if isinstance(mask, dict) else ("",)
    example = (input_ids, position_ids, *_flatten(mask, cache))
    try:
        # Warnings are kept from the user: the trials prove sizes that the model's code reads harmless. The tracer also
        # touches every attribute of the model, deprecated ones as well.
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            replay = torch.jit.trace(_Recordable(loaded.model, cache, kinds), example, check_trace=False)
    except Exception as error:  # the model's own code and the tracer may raise anything, and the direct pass serves
        raise _Unrecordable(f"{type(error).__name__} while recording: {error}") from error
    if any(phrase in str(warning.message) for warning in said for phrase in _VALUE_WARNINGS):
        raise _Unrecordable("its forward pass turns tensors into Python or NumPy values")
    return TracedForward(replay)


def _prove(
    direct: ForwardPass, recorded: ForwardPass, loaded: LoadedModel, masks: MaskBuilder, prefiller: Prefiller
) -> None:
    """Runs both side by side, each on a cache of its own."""
    mine, theirs = _trial_cache(loaded, prefiller), _trial_cache(loaded, prefiller)
    for rows, first in _TRIALS:
        try:
            expected = direct(*_trial(loaded, masks, mine, rows, first), mine)
            actual = recorded(*_trial(loaded, masks, theirs, rows, first), theirs)
        except RuntimeError as error:
            raise _Unrecordable(f"its recording fails at {rows} rows: {error}") from error
        _compare(expected, actual)
        for mine_layer, their_layer in zip(mine.used_layers, theirs.used_layers, strict=True):
            _compare(mine_layer.keys, their_layer.keys)
            _compare(mine_layer.values, their_layer.values)


def _compare(expected: torch.Tensor, actual: torch.Tensor) -> None:
    tolerance = 1e-5 if expected.dtype == torch.float32 else 1e-2
    if expected.shape != actual.shape or not torch.allclose(expected, actual, rtol=tolerance, atol=tolerance):
        raise _Unrecordable("its recording gives other results")


def _trial_cache(loaded: LoadedModel, prefiller: Prefiller) -> SlotCache:
    device = loaded.model.device
    cache = SlotCache(Shape(_TRIAL_SLOTS, COLUMNS), loaded.layer_types, device)
    [prefix] = prefiller.run([HARMLESS])
    rows = torch.arange(_TRIAL_SLOTS, device=device)
    cache.store(rows, prefix.batch.cache, torch.zeros_like(rows))
    return cache


def _trial(
    loaded: LoadedModel, masks: MaskBuilder, cache: SlotCache, rows: int, first: int
) -> tuple[torch.Tensor, torch.Tensor, AttentionMask]:
    """Inputs of a step at positions `first`, `first` - 1, ... of its rows; the cache has begun."""
    device = loaded.model.device
    first = min(first, loaded.context - 1)
    positions = (first - torch.arange(rows, device=device)).clamp_(min=0)
    columns = first + 1
    if columns > cache.shape.columns:
        cache.resize(Shape(_TRIAL_SLOTS, 2 * cache.shape.columns), _TRIAL_SLOTS)
    cache.begin(positions, columns)
    return torch.arange(rows, device=device)[:, None] + 1, positions[:, None], masks.decode(positions, columns)


def _flatten(mask: AttentionMask, cache: SlotCache) -> list[torch.Tensor]:
    masks = list(mask.values()) if isinstance(mask, dict) else [mask]
    index = [cache.step.index[heads] for heads in sorted(cache.step.index)]
    return masks + index + [storage for layer in cache.used_layers for storage in (layer.keys, layer.values)]
