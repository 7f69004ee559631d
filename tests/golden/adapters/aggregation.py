"""Aggregation of token losses."""

from __future__ import annotations

from rollmesh.learner.algorithms.aggregation import aggregate, read_aggregation
from tests.golden.adapters import adapter
from tests.golden.case import Case, Outputs


@adapter(
    "B_loss_aggregation",
    "verl",
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
def verl_aggregation(case: Case) -> Outputs:
    token_loss = case.flat("loss_mat").requires_grad_()
    mode = read_aggregation(case.settings["loss_agg_mode"])
    width = case.inputs["loss_mat"].shape[1]
    horizon = float(case.settings.get("loss_scale_factor") or width)
    loss = aggregate(token_loss, case.tokens(), case.counts, mode, horizon)
    loss.backward()
    return {"out_loss": loss, "out_grad_loss_mat": case.padded(token_loss.grad)}
