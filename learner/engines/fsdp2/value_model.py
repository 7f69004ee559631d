"""A value model: the backbone of a causal language model with a scalar head in place of the vocabulary.

V(s_t) is the value before token t. It is read from the hidden state of the token before it, the same place that
predicts the token in a language model. The vocabulary's logits are never computed. The head works in float32 whatever
the backbone's dtype: values are compared with returns, and bfloat16 would round them to three digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rollmesh.learner.algorithms.types import ModelOutput
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.fsdp2.engine import Fsdp2Engine
from rollmesh.mesh.errors import DataError

HEAD = "value_head"
# The second is how Hugging Face names the head of a reward model (sequence classification with one label).
_HEADS_IN_FOLDERS = (HEAD, "score")


class ValueModel(nn.Module):
    """Backbone and head; parameters are named as in a folder of the language model, the head's `value_head.*`.

    The head starts at zero: every first estimate is exactly 0. So the first advantages are plain returns, and do not
    depend on a seed.

    Args:
        shell: the language model; loses its output layer.

    Raises:
        DataError: the model does not name its backbone.
    """

    value_head: nn.Linear

    def __init__(self, shell: PreTrainedModel) -> None:
        super().__init__()
        prefix = shell.base_model_prefix
        if shell.base_model is shell or shell.get_output_embeddings() is None:
            raise DataError(
                f"{type(shell).__name__} does not separate its backbone from its output layer",
                hint="choose another model for the critic",
            )
        self._backbone_name = prefix
        self.add_module(prefix, shell.base_model)
        self.add_module(HEAD, nn.Linear(shell.config.get_text_config().hidden_size, 1))
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, predictors: Tensor, **inputs: Any) -> Tensor:
        """Values at the given places.

        Args:
            predictors: int64 [R], places among the tokens, row after row.
            inputs: of the backbone.

        Returns:
            float32 [R, 1].
        """
        backbone = self.get_submodule(self._backbone_name)
        hidden: Tensor = backbone(**inputs, use_cache=False).last_hidden_state
        # An embedding look-up is a gather with a fast backward; see `attention`.
        chosen = functional.embedding(predictors, hidden.flatten(0, 1))
        values: Tensor = self.value_head(chosen.float())
        return values


class ValueModelEngine(Fsdp2Engine):
    """Values of the trained tokens, from any Hugging Face causal language model whose attention can run packed."""

    _backbone_only = True

    def _build(self, shell: PreTrainedModel) -> nn.Module:
        model = ValueModel(shell)
        source = self._spec.model.path
        saved = _saved_head(Path(source))
        with torch.no_grad():
            for name, parameter in model.value_head.named_parameters():
                if name in saved:
                    _fill(parameter, saved[name], source)
        # The rest of the shell writes folders: the vocabulary's layer must neither be kept nor written.
        shell.set_output_embeddings(nn.Identity())
        return model

    def _forward(self, batch: PackedBatch, *, sum_pi_squared: bool = False) -> tuple[ModelOutput, Tensor]:
        del sum_pi_squared
        inputs, predictors = self._inputs(batch.row)
        values = self._model(predictors, **inputs).squeeze(-1)
        return ModelOutput(values=values), values

    def _empty_output(self, *, sum_pi_squared: bool) -> ModelOutput:
        del sum_pi_squared
        return ModelOutput(values=torch.zeros(0, device=self.device))


def _saved_head(folder: Path) -> dict[str, Tensor]:
    """Tensors of the head by their name in it, where the folder holds one."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                head, _, rest = name.rpartition(".")
                if head in _HEADS_IN_FOLDERS:
                    found[rest] = tensors.get_tensor(name)
    return found


def _fill(parameter: nn.Parameter, saved: Tensor, source: str) -> None:
    if saved.shape != parameter.shape:
        raise DataError(
            f"{source} holds a head of shape {list(saved.shape)}; a value has one number, {list(parameter.shape)}",
            hint="choose a model without a head, or with a scalar one",
        )
    parameter.copy_(saved)
