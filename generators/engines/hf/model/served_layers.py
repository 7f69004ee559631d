"""The models that the `hf` engine serves, by configuration and class: attention to all earlier tokens, or to a window.

A window counts where the model's class cuts attention off at it: others carry the number and see everything. Windows
that cannot be read here show in `probe`, under the first weights. Layers with a state from token to token need a cache
of their own, which this engine does not have: linear attention, convolutions, state spaces. No model is loaded here: a
run is refused before it starts.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rollmesh.mesh.errors import DataError

_CAUSAL: Any = MODEL_FOR_CAUSAL_LM_MAPPING
_LAYER_TYPES = {"full_attention", "sliding_attention"}
ELSEWHERE = "set rollout.engine to vllm or sglang, as far as they know the model"


@dataclass(frozen=True, slots=True)
class ServedLayers:
    """The layers of a model.

    Attributes:
        layer_types: `full_attention` or `sliding_attention`, one per layer.
        window: tokens that a sliding layer sees, the current one included; None without such layers.
        longest: sequence that the model takes, in tokens.
    """

    layer_types: tuple[str, ...]
    window: int | None
    longest: int


def layout_of(config: PreTrainedConfig, folder: Path) -> ServedLayers:
    """The layers of a model that the engine serves.

    Args:
        config: of the model.
        folder: where it is, for errors.

    Raises:
        DataError: it is no causal language model, has other layers, or does not say how long a sequence may be.
    """
    text = config.get_text_config()
    if type(config) not in _CAUSAL and type(text) not in _CAUSAL:
        raise DataError(f"{folder}/config.json: {config.model_type} is not a causal language model")
    model = _class_of(text if type(text) in _CAUSAL else config)
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False:
        window = None
    declared: Any = getattr(text, "layer_types", None)
    kind = "sliding_attention" if window else "full_attention"
    layer_types = tuple(declared) if declared else (_undeclared_kind(text) or kind,) * int(text.num_hidden_layers)
    if not _has_sliding_window(model):
        layer_types = tuple("full_attention" if kind == "sliding_attention" else kind for kind in layer_types)
    if unknown := set(layer_types) - _LAYER_TYPES:
        raise DataError(
            f"{folder} ({config.model_type}) has layers of the kind {', '.join(sorted(unknown))}, and rollout.engine: "
            "hf serves full and sliding-window attention alone",
            hint=ELSEWHERE,
        )
    sliding = "sliding_attention" in layer_types
    if sliding and not window:
        raise DataError(f"{folder}/config.json: sliding_attention layers without sliding_window")
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise DataError(
            f"{folder}/config.json ({config.model_type}) does not say how long a sequence may be: it has no "
            "max_position_embeddings, which rollout.engine: hf needs",
            hint=f"add it; where the model has no such limit, {ELSEWHERE}",
        )
    if why := _obstacle(text, model):
        raise DataError(f"{folder} ({config.model_type}) cannot be served by rollout.engine: hf: {why}", hint=ELSEWHERE)
    return ServedLayers(layer_types, int(window) if sliding and window else None, longest)


def _class_of(config: PreTrainedConfig) -> Any:
    model_class = _CAUSAL[type(config)]
    return model_class[0] if isinstance(model_class, tuple) else model_class


def _has_sliding_window(model: Any) -> bool:
    """True where a class of models cuts attention off at a window: its module has transformers' mask for it."""
    return hasattr(sys.modules[model.__module__], "create_sliding_window_causal_mask")


def _undeclared_kind(text: PreTrainedConfig) -> str:
    """The kind of layers by the class of a model, where the configuration names no kind; empty for attention."""
    return "recurrence" if type(text) in _CAUSAL and _class_of(text)._is_stateful else ""


def _obstacle(text: PreTrainedConfig, model: Any) -> str:
    """The reason why sequences of different lengths cannot be decoded in one batch; empty where none can be seen."""
    if hasattr(text, "is_decoder") and hasattr(text, "add_cross_attention") and not text.is_decoder:
        return "it is an encoder, whose tokens see those after them"
    parameters = inspect.signature(model.forward).parameters
    if missing := {"position_ids", "past_key_values"} - set(parameters):
        return f"{model.__name__} takes no {' and no '.join(sorted(missing))}"
    if getattr(text, "alibi", False):
        return "its attention is biased by distance (alibi), for one sequence at a time"
    if "local" in getattr(text, "attention_layers", ()):
        return "its local attention is for sequences of one length"
    return ""
