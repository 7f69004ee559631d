"""The entropy term of the loss."""

from __future__ import annotations

import numpy as np
import torch
from torch.distributions import Categorical

from rollmesh.learner.algorithms.aggregation import aggregate, read_aggregation
from tests.golden.adapters import adapter
from tests.golden.case import Case, Outputs


@adapter("B_entropy", "verl", "entropy_loss")
def entropy_loss(case: Case) -> Outputs:
    mask = case.mask
    assert mask is not None
    logits = case.rows("logits").requires_grad_()
    rows = logits.flatten(0, 1)
    per_token = Categorical(logits=rows).entropy()
    trained = per_token[torch.from_numpy(mask.ravel())]
    mode = read_aggregation(case.settings["loss_agg_mode"])
    horizon = float(case.settings.get("loss_scale_factor") or mask.shape[1])
    loss = aggregate(trained, case.tokens(advantages=trained.detach()), case.counts, mode, horizon)
    loss.backward()
    return {"out_entropy": per_token.reshape(mask.shape), "out_loss": loss, "out_grad_logits": np.asarray(logits.grad)}
