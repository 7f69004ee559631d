"""A causal language model: log-probs and entropies of the trained tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollmesh.learner.algorithms.types import ModelOutput
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.fsdp2.engine import Fsdp2Engine
from rollmesh.learner.engines.fsdp2.logprobs import token_log_probs


class LanguageModelEngine(Fsdp2Engine):
    """Any Hugging Face causal language model whose attention can run packed."""

    def _build(self, language_model: PreTrainedModel) -> nn.Module:
        for child in language_model.children():
            if isinstance(child, PreTrainedModel):
                child.register_forward_hook(_in_one_row)
        return language_model

    def _forward(self, batch: PackedBatch, *, sum_pi_squared: bool = False) -> tuple[ModelOutput, Tensor]:
        inputs, predictors = self._inputs(batch.row)
        logits = self._model(**inputs, use_cache=False, logits_to_keep=predictors).logits.squeeze(0)
        output = token_log_probs(
            logits,
            batch.row.labels,
            batch.row.temperatures,
            entropy_gradient=self._spec.entropy_gradient and torch.is_grad_enabled(),
            sum_pi_squared=sum_pi_squared,
        )
        return output, output.policy()[0]

    def _empty_output(self, *, sum_pi_squared: bool) -> ModelOutput:
        none = torch.zeros(0, device=self.device)
        return ModelOutput(log_probs=none, entropy=none, sum_pi_squared=none if sum_pi_squared else None)


def _in_one_row(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Hidden states row after row, [1, S * L, H]: so `logits_to_keep` picks tokens of all rows."""
    output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[None]
    return output
