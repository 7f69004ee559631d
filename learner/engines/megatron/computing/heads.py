"""The last layer of a model in place of Megatron's: log-probs or values of the trained tokens, never all logits.

Each takes the place of `GPTModel.output_layer`, with parameters under the same names. All processes of a last stage
that share a micro-batch have the same results. Their gradient comes from the one that calls the loss.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional

from rollmesh.learner.algorithms.types import ModelOutput
from rollmesh.learner.engines.megatron.computing.inputs import MegatronInputs
from rollmesh.learner.engines.megatron.computing.results import gather_context, led_by
from rollmesh.learner.engines.output.layer import LogitMemory, VocabularyShard, shard_log_probs
from rollmesh.learner.engines.output.logit_form import LogitForm
from rollmesh.learner.engines.output.softmax_pieces import Targets


class ResultHead(nn.Module):
    """Results of the trained tokens.

    Args:
        groups: Megatron's process groups.
        sequence_parallel: hidden states come in parts.
        leads: this process calls the loss.

    Attributes:
        inputs: of the micro-batch that is about to be computed.
    """

    inputs: MegatronInputs

    def __init__(self, groups: Any, *, sequence_parallel: bool, leads: bool) -> None:
        super().__init__()
        self._tensor_group: dist.ProcessGroup = groups.tp
        self._context_group: dist.ProcessGroup = groups.cp
        self._results_group: dist.ProcessGroup = groups.tp_cp
        self._sequence_parallel, self._leads = sequence_parallel, leads

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Results in the form in which `GPTModel` hands logits on.

        Args:
            hidden: [t, 1, H], or this process's part of the t.
            weight: of a tied embedding.
            runtime_gather_output: not used.

        Returns:
            float32 [R, 1, columns], and nothing in the place of a bias.
        """
        del runtime_gather_output
        inputs = self.inputs
        columns = self._columns(self._whole(hidden)[:, 0], weight, inputs)
        gathered = gather_context(columns, inputs.trained, inputs.total, self._context_group)
        results = led_by(gathered, self._results_group, leads=self._leads)
        return torch.stack(results, -1)[:, None], None

    @abstractmethod
    def output(self, results: Tensor) -> ModelOutput:
        """The fields of a result [1, R, columns]."""

    @abstractmethod
    def _whole(self, hidden: Tensor) -> Tensor:
        """All of the process's tokens."""

    @abstractmethod
    def _columns(self, hidden: Tensor, weight: Tensor | None, inputs: MegatronInputs) -> list[Tensor]:
        """float32 [r] each, for this process's predictors."""


class LogProbHead(ResultHead):
    """Log-probs and entropies over a vocabulary that is divided among processes.

    Args:
        layer: Megatron's output layer, which gives its weight where it has one.
        groups: Megatron's process groups.
        vocabulary: token ids that exist.
        memory: for logits.
        rest: of `ResultHead`.
    """

    def __init__(self, layer: Any, groups: Any, vocabulary: int, memory: LogitMemory, **rest: bool) -> None:
        super().__init__(groups, **rest)
        self.weight: nn.Parameter | None
        self.register_parameter("weight", layer.weight)
        self._memory, self._vocabulary = memory, vocabulary
        self.entropy_gradient = self.sum_pi_squared = False

    def output(self, results: Tensor) -> ModelOutput:
        columns = results[0].unbind(-1)
        entropy = columns[1] if self.entropy_gradient else columns[1].detach()
        squares = columns[2].detach() if self.sum_pi_squared else None
        return ModelOutput(log_probs=columns[0], entropy=entropy, sum_pi_squared=squares)

    def _whole(self, hidden: Tensor) -> Tensor:
        if self._sequence_parallel:
            whole: Tensor = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self._tensor_group
            )
            return whole
        copied: Tensor = copy_to_tensor_model_parallel_region(hidden, group=self._tensor_group)
        return copied

    def _columns(self, hidden: Tensor, weight: Tensor | None, inputs: MegatronInputs) -> list[Tensor]:
        row = inputs.batch.row
        temperatures = row.temperatures
        targets = Targets(
            row.labels[inputs.trained],
            temperatures[inputs.trained] if isinstance(temperatures, Tensor) else temperatures,
            entropy_gradient=self.entropy_gradient and torch.is_grad_enabled(),
            sum_pi_squared=self.sum_pi_squared,
        )
        own = self.weight if weight is None else weight
        assert own is not None, "a tied output layer is called with the embedding"
        shard = VocabularyShard(self._tensor_group.rank() * len(own), self._vocabulary, self._tensor_group)
        # An embedding look-up is a gather with a fast backward.
        chosen = functional.embedding(inputs.predictors, hidden)
        results = shard_log_probs(chosen, own, None, targets, shard, self._memory, LogitForm())
        return [result for result in results if result is not None]


class ValueHead(ResultHead):
    """Values: a scalar in place of the vocabulary, in float32; parameters `weight` [1, H] and perhaps `bias` [1].

    Args:
        width: H.
        device: of the parameters.
        groups: Megatron's process groups.
        bias: there is one.
        rest: of `ResultHead`.
    """

    def __init__(self, width: int, device: torch.device, groups: Any, *, bias: bool, **rest: bool) -> None:
        super().__init__(groups, **rest)
        self.weight = nn.Parameter(torch.zeros(1, width, device=device))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.zeros(1, device=device)) if bias else None)

    def output(self, results: Tensor) -> ModelOutput:
        return ModelOutput(values=results[0, :, 0])

    def _whole(self, hidden: Tensor) -> Tensor:
        if not self._sequence_parallel:
            return hidden
        # Every process computes the same values, so each needs but its own tokens' gradients.
        whole: Tensor = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=self._tensor_group
        )
        return whole

    def _columns(self, hidden: Tensor, weight: Tensor | None, inputs: MegatronInputs) -> list[Tensor]:
        del weight
        chosen = functional.embedding(inputs.predictors, hidden)
        return [functional.linear(chosen.float(), self.weight, self.bias)[:, 0]]
