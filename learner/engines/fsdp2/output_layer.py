"""The output layer as a module of a sharded model: its parameters are gathered for it, and log-probs leave it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from rollmesh.learner.engines.fsdp2.opaque import Opaque
from rollmesh.learner.engines.output.layer import LogitMemory, VocabularyShard, shard_log_probs
from rollmesh.learner.engines.output.logit_form import LogitForm
from rollmesh.learner.engines.output.softmax_pieces import Targets


class OutputLayer(nn.Module):
    """A linear layer over the vocabulary that can give log-probs in place of logits.

    Args:
        layer: gives its parameters, which keep their names.
        form: from its products to logits.
        memory: how much may be kept.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear, form: LogitForm, memory: LogitMemory) -> None:
        super().__init__()
        self.weight = layer.weight
        self.register_parameter("bias", layer.bias)
        self._form, self._memory = form, memory

    def forward(
        self, hidden: Tensor, targets: Opaque[Targets] | None = None
    ) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:
        """Products, or with targets the log-probs of their tokens.

        Args:
            hidden: [..., H]; with targets [R, H].
            targets: of the R rows.

        Returns:
            [..., V]; with targets float32 [R] of each: log-probs, entropies, sums of squares (see `token_log_probs`).
        """
        if targets is None:
            return functional.linear(hidden, self.weight, self.bias)
        whole = VocabularyShard(first=0, real=len(self.weight))
        return shard_log_probs(hidden, self.weight, self.bias, targets.value, whole, self._memory, self._form)
