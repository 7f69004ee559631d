"""A causal language model: log-probs and entropies of the trained tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from learner.algorithms.types import ModelOutput
from learner.batching.types import PackedBatch
from learner.engines.fsdp2.engine import Fsdp2Engine
from learner.engines.fsdp2.logprobs import token_log_probs


class LanguageModelEngine(Fsdp2Engine):
    """Any Hugging Face causal language model whose attention can run packed."""

    def _build(self, shell: PreTrainedModel) -> nn.Module:
        return shell

    def _forward(self, batch: PackedBatch, *, sum_pi_squared: bool = False) -> tuple[ModelOutput, Tensor]:
        logits = self._model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.predictors,
            layout=self._layout(batch),
        ).logits.squeeze(0)
        output = token_log_probs(
            logits,
            batch.labels,
            batch.temperatures,
            entropy_gradient=self._spec.entropy_gradient and torch.is_grad_enabled(),
            sum_pi_squared=sum_pi_squared,
        )
        return output, output.policy()[0]

    def _nothing(self, *, sum_pi_squared: bool) -> ModelOutput:
        none = torch.zeros(0, device=self.device)
        return ModelOutput(log_probs=none, entropy=none, sum_pi_squared=none if sum_pi_squared else None)
