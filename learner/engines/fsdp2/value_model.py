"""A value model: the backbone of a causal language model with a scalar head in place of the vocabulary.

V(s_t) is the value before token t. It is read from the hidden state of the token before it, the same place that
predicts the token in a language model. The vocabulary's logits are never computed. The head works in float32 whatever
the backbone's dtype: values are compared with returns, and bfloat16 would round them to three digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rollmesh.learner.algorithms.types import ModelOutput
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.fsdp2.loading import fill
from rollmesh.learner.engines.fsdp2.opaque import Opaque
from rollmesh.learner.engines.fsdp2.runner import ModelRunner
from rollmesh.learner.model_files.value_head import HEAD, stored_head
from rollmesh.learner.model_files.weight_files import WeightFiles
from rollmesh.learner.vision.tower import RowImages, VisionTower
from rollmesh.mesh.errors import DataError


class ValueModel(nn.Module):
    """Backbone and head; parameters are named as in a folder of the language model, the head's `value_head.*`.

    Args:
        language_model: without its output layer from now on.
        bias: the head has one.
        tower: of a model that takes images.

    Raises:
        DataError: the model does not name its backbone.
    """

    value_head: nn.Linear

    def __init__(self, language_model: PreTrainedModel, tower: VisionTower | None = None, *, bias: bool = True) -> None:
        super().__init__()
        self._tower = tower
        prefix = language_model.base_model_prefix
        if language_model.base_model is language_model or language_model.get_output_embeddings() is None:
            raise DataError(
                f"{type(language_model).__name__} does not separate its backbone from its output layer",
                hint="choose another model for the critic",
            )
        self._backbone_name = prefix
        self.add_module(prefix, language_model.base_model)
        width = language_model.config.get_text_config().hidden_size
        self.add_module(HEAD, nn.Linear(width, 1, bias=bias, device="meta"))

    def forward(self, predictors: Tensor, images: Opaque[RowImages] | None = None, **inputs: Any) -> Tensor:
        """Values at the given places.

        Args:
            predictors: int64 [R], places among the tokens, row after row.
            images: of the tokens; in rows of the probe they are among the inputs.
            inputs: of the backbone.

        Returns:
            float32 [R, 1].
        """
        if images is not None and self._tower is not None:
            inputs["inputs_embeds"] = self._tower.embed(inputs.pop("input_ids"), images.value)
        backbone = self.get_submodule(self._backbone_name)
        hidden: Tensor = backbone(**inputs, use_cache=False).last_hidden_state
        # An embedding look-up is a gather with a fast backward; see `attention`.
        chosen = functional.embedding(predictors, hidden.flatten(0, 1))
        values: Tensor = self.value_head(chosen.float())
        return values


class ValueModelRunner(ModelRunner):
    """Values of the trained tokens, from any Hugging Face causal language model with attention that can run packed."""

    backbone_only = True

    def _build(self, language_model: PreTrainedModel) -> nn.Module:
        return ValueModel(language_model, self.tower, bias=self._spec.head_bias)

    def _fill_new(self, parameters: Mapping[str, nn.Parameter], files: WeightFiles) -> None:
        """Fills the head from the folder, where that has one."""
        for name, parameter in parameters.items():
            if (source := stored_head(files, name, parameter.shape)) is None:
                nn.init.zeros_(parameter)
            else:
                fill(parameter, files, source)

    def forward(self, batch: PackedBatch, *, sum_pi_squared: bool = False) -> tuple[ModelOutput, Tensor]:
        del sum_pi_squared
        part = self._own_part(batch.row)
        inputs, predictors = self._inputs(part)
        inputs |= self._image_inputs(batch.row, inputs["input_ids"])
        output = self._gather_output(part, ModelOutput(values=self.module(predictors, **inputs).squeeze(-1)))
        assert output.values is not None
        return output, output.values

    def empty_output(self, *, sum_pi_squared: bool) -> ModelOutput:
        del sum_pi_squared
        return ModelOutput(values=torch.zeros(0, device=self.device))
