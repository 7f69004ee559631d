"""Values of a trained batch's tokens, for the few responses that are kept for people.

Every rank holds the rollouts of the whole batch. The policy's log-probs come from the batch stage where it computes
them, else from the first update's forward pass. In the latter case a process knows those of the tokens that it computes
itself. After the updates each one gets what the others know.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, Rollouts, TokenBatch
from rollmesh.learner.distributed.rank_batch import OptimizerStep
from rollmesh.learner.distributed.train_plan import TrainPlan
from rollmesh.learner.engines.world import World

TokenValues = dict[str, NDArray[np.float32]]
"""Name -> float32, one value per trained token of a response; NaN where it is not known."""
_FIELDS = ("advantages", "reference_log_probs", "values", "keep")


class PolicyLogProbs:
    """The policy's log-probs before a batch's first update of each token.

    Args:
        num_tokens: R, trained tokens of the batch.
        device: of the model.

    Attributes:
        values: float32 [R], nats; NaN where this process has not computed them. None: no update has begun.
    """

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self._num_tokens = num_tokens
        self._device = device
        self.values: Tensor | None = None
        self._complete = False

    def take_all(self, log_probs: Tensor) -> None:
        """Takes those of the batch stage, [R]; later ones are of the same policy, or of one that was updated."""
        if self.values is None:
            self.values, self._complete = log_probs.detach().float(), True

    def watching(self, step: OptimizerStep, loss: Loss) -> Loss:
        """The same loss for a step's micro-batches; it notes the log-probs of tokens that are not known yet."""
        if self._complete:
            return loss
        if self.values is None:
            self.values = torch.full((self._num_tokens,), torch.nan, device=self._device)
        known = self.values
        places = {
            id(batch.tokens): micro.token_indices for micro, batch in zip(step.micro_batches, step.batches, strict=True)
        }

        def watched(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
            if (indices := places.get(id(tokens))) is not None:
                log_probs, _ = output.policy()
                known[indices] = torch.where(known[indices].isnan(), log_probs.detach().float(), known[indices])
            return loss(output, tokens, counts)

        return watched

    def gather(self, world: World) -> None:
        """Adds what other processes have computed; collective. It sends 4 bytes per token.

        Args:
            world: the processes.
        """
        if self.values is None or self._complete:
            return
        # Some processes compute the same tokens, as do those that divide matrices, and some none, as early stages do.
        known = world.max(self.values.masked_fill(self.values.isnan(), -torch.inf))
        self.values, self._complete = known.masked_fill(known.isneginf(), torch.nan), True


@dataclass(frozen=True, eq=False)
class BatchTokens:
    """The tokens of a batch that was trained.

    Attributes:
        plan: of the batch.
        rollouts: after the batch stage.
        policy_log_probs: see `PolicyLogProbs.values`; of all processes.
    """

    plan: TrainPlan
    rollouts: Rollouts
    policy_log_probs: Tensor | None

    def of(self, group_id: str, member: int) -> TokenValues:
        """The values of a response's trained tokens, on the host; none for a response that was not trained.

        Returns:
            Those that the algorithm has: `advantages`, `policy_log_probs`, `reference_log_probs`, and the critic's
            `values`. `keep` is 0 where a correction or a filter has left the token out.
        """
        place = self._places.get((group_id, member))
        if place is None:
            return {}
        fields = {name: getattr(self.rollouts, name) for name in _FIELDS} | {"policy_log_probs": self.policy_log_probs}
        found = {name: values[place].float() for name, values in fields.items() if values is not None}
        if not found:
            return {}
        # One copy from the device for all.
        rows = torch.stack(list(found.values())).cpu().numpy()
        return dict(zip(found, rows, strict=True))

    @cached_property
    def _places(self) -> dict[tuple[str, int], slice]:
        """The places of each response's tokens in [R]."""
        ends = self.rollouts.lengths.cumsum(0).tolist()
        names = [(member.group_id, member.member) for member in self.plan.members]
        return dict(zip(names, map(slice, [0, *ends[:-1]], ends), strict=True))
