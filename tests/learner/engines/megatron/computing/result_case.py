"""Results and gradients in one process of a data-parallel rank; tests run this in several."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rollmesh.learner.engines.megatron.computing.results import gather_context, led_by

# Places of each process's tokens; one has none.
PLACES = {2: [[5, 0, 2, 6, 3], [1, 4]], 3: [[3, 0, 6, 1], [], [5, 2, 4]]}
TOTAL = 7
LOG_PROBS, ENTROPIES = -torch.arange(1.0, TOTAL + 1), torch.arange(10.0, 10.0 + TOTAL)
PULL = torch.linspace(-1.0, 2.0, TOTAL)


def compute(_harness, leader: int, used: int) -> tuple[list[Tensor], Tensor | None, bool]:
    """Results, the gradient of this process's own log-probs or entropies, whether squares can be differentiated."""
    process, group = dist.get_rank(), dist.group.WORLD
    places = torch.tensor(PLACES[group.size()][process], dtype=torch.int64)
    own = [LOG_PROBS[places].requires_grad_(), ENTROPIES[places].requires_grad_(), LOG_PROBS[places].exp()]
    results = led_by(gather_context(own, places, TOTAL, group), group, process == leader)
    # A loss may use only one of the results; the others' gradients are to be ignored.
    loss = (results[used] * PULL).sum() if process == leader else results[0].sum() * torch.nan
    loss.backward()
    return [result.detach() for result in results], own[used].grad, results[2].requires_grad
