"""The critic's loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rollmesh.learner.algorithms.aggregation import aggregate, read_aggregation
from rollmesh.learner.algorithms.value import value_loss
from tests.golden.adapters import adapter
from tests.golden.case import Case, Outputs


def _loss(case: Case, mode: str, factor: float, **settings: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, gradient [R] and metrics per token, summed."""
    values, old, returns = (case.flat(name) for name in ("vpreds", "values", "returns"))
    values.requires_grad_()
    per_token, metrics = value_loss(values, old, returns, **settings)
    horizon = float(case.settings.get("loss_scale_factor") or case.inputs["vpreds"].shape[1])
    share = aggregate(per_token, case.tokens(advantages=returns), case.counts, read_aggregation(mode), horizon)
    loss = factor * share
    loss.backward()
    assert values.grad is not None
    return loss, values.grad, metrics.sums


@adapter("B_value_loss", "verl", "clipped_value_loss")
def verl_value_loss(case: Case) -> Outputs:
    loss, gradient, sums = _loss(case, case.settings["loss_agg_mode"], 1.0, clip=case.settings["cliprange_value"])
    share = sums["critic/vf_clipfrac"] / max(case.counts.tokens, 1)
    return {"out_loss": loss, "out_grad_vpreds": case.padded(gradient), "vf_clipfrac": share}


@adapter("B_value_loss", "areal", "clipped_value_loss_mse", "clipped_value_loss_huber")
def areal_value_loss(case: Case) -> Outputs:
    loss, gradient, _ = _loss(
        case,
        "token_mean",
        1.0,
        clip=case.settings["value_eps_clip"],
        kind=case.settings["loss_fn_type"],
        huber_delta=case.settings["huber_delta"],
    )
    return {"out_loss": loss, "out_grad_vpreds": case.padded(gradient)}


@adapter("B_value_loss", "slime", "clipped_value_loss")
def slime_value_loss(case: Case) -> Outputs:
    # Squares without the half; rows are summed (divided by the batch size elsewhere).
    factor = 2.0 * case.counts.sequences
    clip = case.settings["value_clip"]
    loss, gradient, _ = _loss(case, "seq_mean_token_mean", factor, clip=clip)
    rows = case.tokens(advantages=case.flat("returns"))
    shares = []
    for row in range(rows.num_sequences):
        inside = rows.sequence_ids == row
        if inside.any():
            values, old, returns = (case.flat(name)[inside] for name in ("vpreds", "values", "returns"))
            _, metrics = value_loss(values, old, returns, clip=clip)
            shares.append(metrics.sums["critic/vf_outside"] / inside.sum())
    return {
        "out_loss": loss,
        "out_grad_vpreds": case.padded(gradient),
        "value_loss": loss,
        "value_clipfrac": sum(shares),
    }
