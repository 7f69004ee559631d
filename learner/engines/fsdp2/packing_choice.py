"""The packing that a model can take, decided from its class and its configuration.

Invariant: features that short sequences cannot show are decided here. These are layers other than attention, attention
over chunks, sinks, and rotary embeddings that follow the longest sequence of a batch. The probe (`probe`) proves the
decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rollmesh.learner.batching.types import Packing
from rollmesh.learner.engines.fsdp2.recurrent.layers import recurrent_layers
from rollmesh.learner.engines.layer_kinds import layer_kinds, properties_of
from rollmesh.learner.engines.tolerances import REFUSED_HINT
from rollmesh.learner.model_files.stored_model import build_on_meta
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.model_config import naming_config, read_config

# Settings of attention that chooses the tokens each one sees, of sequences longer than the probe's. Their choice is not
# that of transformers' eager attention: it changes with the padding.
_CHOICES = ("index_topk", "keep_window_size")
# Rotary embeddings with frequencies that depend on the longest position of a forward pass.
_BATCH_ROPE = frozenset({"dynamic", "longrope"})
# Name of the parameters of attention sinks in transformers' models.
_SINKS = "sinks"


@dataclass(frozen=True, slots=True)
class PackingChoice:
    """The packing of a model.

    Attributes:
        packing: how its sequences are laid out.
        reason: why every sequence needs a row; empty where none does.
        recurrent: layers that compute sequences apart, with their prompts.
    """

    packing: Packing
    reason: str = ""
    recurrent: tuple[nn.Module, ...] = ()

    @property
    def undivided(self) -> str:
        """The reason why processes cannot divide a sequence; empty where they can."""
        return "its layers carry a state from token to token" if self.recurrent else self.reason


def choose_packing(model: PreTrainedModel) -> PackingChoice:
    """The densest packing that can be exact.

    Args:
        model: loaded, or without weights.
    """
    packings = {kind: properties_of(kind).packing for kind in layer_kinds(model.config)}
    recurrent = tuple(recurrent_layers(model)) if "recurrent" in packings.values() else ()
    possible = ("packed", "recurrent") if recurrent else ("packed",)
    foreign = sorted(kind for kind, packing in packings.items() if packing not in possible)
    if foreign:
        return PackingChoice(Packing.ROWS, f"it has layers of the kind {', '.join(foreign)}")
    if model._is_stateful and not recurrent:
        return PackingChoice(Packing.ROWS, "its layers carry a state from token to token")
    if not recurrent and not model.is_backend_compatible():
        return PackingChoice(Packing.ROWS, "its attention is its own")
    if any(name.rpartition(".")[2] == _SINKS for name, _ in model.named_parameters()):
        return PackingChoice(Packing.ROWS, "its attention has sinks")
    return PackingChoice(Packing.REPEATED, recurrent=recurrent) if recurrent else PackingChoice(Packing.SHARED)


def describe_packing(section: ModelSection) -> str:
    """The packing of a local model, in words, without its weights; or the reason why it is not known."""
    try:
        config = read_config(section.path, section.revision)
        with naming_config(section.path):
            model = build_on_meta(config)
    except DataError as error:
        return f"not known: {error.message}"
    choice = choose_packing(model)
    if choice.packing is Packing.SHARED:
        return f"{config.model_type}: sequences side by side, each prompt once, no padding"
    if choice.packing is Packing.REPEATED:
        return (
            f"{config.model_type}: sequences side by side, each prompt once, but {len(choice.recurrent)} layers carry "
            "a state from token to token and compute prompts again for each response"
        )
    return f"{config.model_type}: every sequence in a row of its own, for {choice.reason}"


def refuse_by_structure(config: PreTrainedConfig, name: str, longest: int | None) -> None:
    """Refuses layers that no short sequence could prove, and sequences that change the rotary embeddings of others.

    Args:
        config: of the model.
        name: the model, for the error.
        longest: tokens of the longest sequence; None: not known, nothing is refused.

    Raises:
        DataError: names the layers, or the limit.
    """
    text = config.get_text_config()
    unknown = sorted({kind for kind in layer_kinds(config) if properties_of(kind).packing is None})
    unknown += [f"with {key}" for key in _CHOICES if hasattr(text, key)]
    if unknown:
        raise DataError(
            f"model {name!r} ({config.model_type}) has layers that cannot be trained here: {', '.join(unknown)}",
            hint=REFUSED_HINT,
        )
    for rope in _rope_settings(getattr(text, "rope_parameters", None)):
        kind = rope.get("rope_type")
        limit = rope.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", None)
        if kind in _BATCH_ROPE and limit is not None and longest is not None and longest > limit:
            raise DataError(
                f"model {name!r} ({config.model_type}) has rotary embeddings of the type {kind!r}: beyond {limit} "
                f"tokens a sequence changes those computed with it, and this run's have up to {longest}",
                hint=f"keep rollout.max_prompt_tokens + rollout.max_response_tokens within {limit}",
            )


def _rope_settings(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """The settings of all rotary embeddings: of the model, or of each kind of layer."""
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield parameters
    for value in parameters.values():
        if isinstance(value, Mapping):
            yield value
