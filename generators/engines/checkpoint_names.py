"""The complete set of a model's weights, by the names on the wire, and its names in a checkpoint.

vLLM and SGLang load checkpoints: per-expert tensors, prefixes of the published files. The names that travel are those
of the loaded Hugging Face model; transformers knows how the one becomes the other. The model is built without memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

from rollmesh.mesh.errors import DataError, WeightsError


class CheckpointLayout:
    """The weights that a model needs.

    Args:
        config: of the model.
        dtype: in which it computes.

    Raises:
        DataError: it is no language model that transformers knows.
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        self._model = _without_memory(config, dtype)
        self._targets: dict[str, torch.Tensor] = dict(self._model.state_dict(keep_vars=True))
        self._first: dict[int, str] = {}
        for name, target in self._targets.items():
            self._first.setdefault(id(target), name)

    @property
    def architecture(self) -> str:
        """Name of the model's class, as checkpoints bear it."""
        return type(self._model).__name__

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Shapes of all parameters, by Hugging Face name."""
        return {name: target.shape for name, target in self._targets.items()}

    def linear_layers(self) -> set[str]:
        """Last parts of the names of all linear layers but the one that gives logits."""
        head = self._model.get_output_embeddings()
        return {
            name.rpartition(".")[2]
            for name, module in self._model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        }

    def to_checkpoint(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Checks a set of tensors and gives them the names and forms of a checkpoint, tied ones once.

        Floating-point tensors come out in the dtype in which the model has them.

        Raises:
            WeightsError: a tensor is unknown, has another shape, or is missing; names it.
        """
        named: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            target = self._targets.get(name)
            if target is None:
                raise WeightsError(f"tensor {name!r} is not part of the model", hint="send Hugging Face names")
            if tensor.shape != target.shape:
                raise WeightsError(f"tensor {name!r} has shape {list(tensor.shape)}, expected {list(target.shape)}")
            if tensor.is_floating_point() != target.is_floating_point():
                raise WeightsError(f"tensor {name!r} has dtype {tensor.dtype}, expected {target.dtype}")
            named.setdefault(self._first[id(target)], tensor.detach())
        if missing := sorted(set(self._first.values()) - named.keys()):
            raise WeightsError(f"{len(missing)} tensors are missing, the first is {missing[0]!r}")
        ordered = {name: named[name] for name in self._first.values()}
        converted: dict[str, torch.Tensor] = revert_weight_conversion(self._model, ordered)
        return converted

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype in which a tensor is passed on: floating-point ones never wider than the model computes."""
        model = self._model.dtype
        return model if tensor.is_floating_point() and tensor.element_size() > model.itemsize else tensor.dtype


def _without_memory(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    error: Exception | None = None
    for factory in (AutoModelForCausalLM, AutoModelForImageTextToText):
        try:
            with torch.device("meta"):
                # Named, for a configuration may name kernels, which transformers would fetch and load.
                model: PreTrainedModel = factory.from_config(
                    config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
                )
        except ValueError as unknown:
            error = unknown
            continue
        model.tie_weights()
        return model
    raise DataError(f"not a language model that transformers knows: {error}")
