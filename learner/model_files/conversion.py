"""Stored tensors and a model's tensors: the table of transformers that makes the ones of the others, a few at a time.

A model's tensors are not always the stored ones: transformers renames some, and it keeps the experts of a layer in one
tensor. Its own loading converts all tensors of a model at once. Here each conversion stands alone, so that memory holds
the tensors of one.

Invariant: results are planned on tensors without memory, before anything is read or written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

# Modules next to the model that predict further tokens.
_PREDICTION = r"(^|\.)mtp(_\w+)?\."

Source = tuple[str, str]
"""A stored tensor's name, and the pattern of the table that it matches."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Stored tensors that make tensors of the model.

    Attributes:
        target: the first tensor of the model that is made.
        sources: what it is made of, in order.
        converter: of the table; None: the only source is the only result.
        results: a tensor without memory for each of the model's that is made, by its name.
    """

    target: str
    sources: tuple[Source, ...]
    converter: WeightConverter | None
    results: Mapping[str, Tensor]

    @property
    def is_by_expert(self) -> bool:
        """Entry i of the only result is made of the i-th source of each pattern, and of nothing else."""
        if self.converter is None or len(self.results) > 1:
            return False
        first, *others = self.converter.operations
        stacks = isinstance(first, MergeModulelist) and first.dim == 0
        return stacks and all(isinstance(other, Concatenate) and other.dim > 0 for other in others)

    def of_experts(self, start: int, stop: int) -> tuple[Source, ...]:
        """The sources of the entries `start` to `stop` of a result that is made by expert."""
        by_pattern: dict[str, list[Source]] = {}
        for source in self.sources:
            by_pattern.setdefault(source[1], []).append(source)
        return tuple(chain.from_iterable(found[start:stop] for found in by_pattern.values()))

    def apply(self, model: PreTrainedModel, tensors: Iterable[tuple[Source, Tensor]]) -> dict[str, Tensor]:
        """Makes the results.

        Args:
            model: that was planned for.
            tensors: all sources with their values, or those of some experts.

        Raises:
            ValueError: they do not fit together.
        """
        if self.converter is None:
            ((_, tensor),) = tensors
            return {self.target: tensor}
        converter = deepcopy(self.converter)
        for (name, pattern), tensor in tensors:
            # Where it loads in the background, it takes what will be a tensor.
            converter.add_tensor(self.target, name, pattern, cast(Any, tensor))
        try:
            made = converter.convert(self.target, model=model, config=model.config)
        except (RuntimeError, LookupError, AttributeError) as error:
            raise ValueError(f"{self.target} cannot be made from the stored tensors: {error}") from error
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


@dataclass(frozen=True, slots=True)
class LoadingPlan:
    """The way from the stored tensors to the model's.

    Attributes:
        conversions: in the order of the stored names.
        missing: parameters of the model that nothing stored makes.
        unexpected: tensors that the model neither has nor is known to leave out.
        unused: stored tensors, by their stored names, that make nothing of the model.
        doubled: those of them in whose place another stored tensor was taken.
    """

    conversions: list[Conversion]
    missing: list[str]
    unexpected: list[str]
    unused: list[str]
    doubled: list[str]


def plan_loading(model: PreTrainedModel, stored: Mapping[str, Tensor]) -> LoadingPlan:
    """Plans the loading of a model. The model notes which part of the table applies, for the way back.

    Args:
        model: its parameters need no memory.
        stored: a tensor without memory for each stored one.

    Raises:
        ValueError: stored tensors do not fit together; names the model's tensor.
    """
    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict(keep_vars=True)
    sources: dict[str, list[Source]] = {}
    unexpected, unused = set(), []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        if target in state:
            sources.setdefault(target, []).append((name, pattern or ""))
        else:
            unexpected.add(target)
            unused.append(name)
    conversions = []
    for target, found in sources.items():
        converter = by_pattern.get(found[0][1])
        conversion = Conversion(target, tuple(found if converter else found[:1]), converter, {})
        results = conversion.apply(model, ((source, stored[source[0]]) for source in conversion.sources))
        conversions.append(replace(conversion, results=results))
    made = {name for conversion in conversions for name in conversion.results}
    cast(Any, model)._weight_conversions = [entry for entry in table if entry.was_used()]
    # Tied parameters are one and the same.
    held = {id(state[name]) for name in made & state.keys()}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    known: Any = SimpleNamespace(missing_keys=set(), unexpected_keys=unexpected | (made - state.keys()))
    model._adjust_missing_and_unexpected_keys(known)
    parts = _further_parts(model)
    unexpected = {name for name in known.unexpected_keys if not parts.search(name)}
    used = {
        name
        for conversion in conversions
        if not state.keys().isdisjoint(conversion.results)
        for name, _ in conversion.sources
    }
    doubled = [name for target, found in sources.items() if found[0][1] not in by_pattern for name, _ in found[1:]]
    unused = sorted(stored.keys() - used, key=dot_natural_key)
    return LoadingPlan(conversions, missing, sorted(unexpected), unused, doubled)


def _further_parts(model: PreTrainedModel) -> re.Pattern[str]:
    """Names of layers that predict further tokens: next to the model under a name of their own, or after its layers."""
    config = model.config.get_text_config()
    count = getattr(config, "num_nextn_predict_layers", None)
    first = getattr(config, "num_hidden_layers", None)
    after = range(first, first + count) if isinstance(first, int) and isinstance(count, int) else ()
    return re.compile("|".join([_PREDICTION, *(rf"(^|\.)layers\.{number}\." for number in after)]))


def group_for_storing(model: PreTrainedModel, names: Iterable[str]) -> list[tuple[str, ...]]:
    """The model's tensors in groups, each of which is stored without the others' help.

    Args:
        model: with the note that `plan_loading` has made.
        names: of its tensors.

    Returns:
        The groups, by the last of their tensors.
    """
    entries = [entry.reverse_transform() for entry in reversed(_used(model))]
    converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        target, pattern = rename_source_key(name, [], converters)
        # Groups are ordered by their last member.
        key = name if pattern is None else target
        groups[key] = [*groups.pop(key, []), name]
    return [tuple(group) for group in groups.values()]


def to_stored(model: PreTrainedModel, group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors of one group of `group_for_storing`, by their stored names."""
    if not _used(model):
        return dict(group)
    stored: dict[str, Tensor] = revert_weight_conversion(model, dict(group))
    return stored


def store_alike(model: PreTrainedModel, planned: PreTrainedModel) -> None:
    """Has a model be stored in the form in which another one of its kind was loaded.

    Args:
        model: with the other's backbone.
        planned: with the note that `plan_loading` has made.
    """
    cast(Any, model)._weight_conversions = _used(planned)


def _used(model: PreTrainedModel) -> list[WeightTransform]:
    """The part of the table that `plan_loading` found to apply."""
    used: list[WeightTransform] = cast(Any, model)._weight_conversions
    return used
