"""AReaL's decoupled PPO: behaviour weights, rejection, interpolated proximal policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rollmesh.learner.algorithms.aggregation import aggregate
from rollmesh.learner.algorithms.correction import (
    CorrectionSettings,
    anchor_and_weights,
    drift_metrics,
    interpolated_proximal,
    kept_metrics,
    rejections,
)
from rollmesh.learner.algorithms.losses.ppo import clipped_surrogate, dual_clipped, ppo
from rollmesh.learner.algorithms.losses.sequence_ratio import gspo, sequence_mean
from rollmesh.learner.algorithms.numerics import log_ratio
from rollmesh.learner.algorithms.types import TokenBatch
from tests.golden.adapters import adapter
from tests.golden.adapters.correction import sequence_ids
from tests.golden.case import Case, Outputs


@adapter(
    "C_decoupled_ppo",
    "areal",
    "no_rejection",
    "sequence_level_gspo",
    "mask_token_ratio",
    "mask_token_kl_k1",
    "mask_token_kl_k2",
    "mask_token_kl_k3",
    "clamp_token_ratio",
    "clamp_token_ratio_lower",
    "mask_seq_ratio_mean",
    "mask_seq_ratio_sum",
    "mask_seq_ratio_max",
    "clamp_seq_ratio_mean",
    "mask_seq_kl_k3_mean",
    "mask_seq_kl_k2_sum",
    "mask_seq_kl_k1_max",
    "huge_behaviour_ratio_mask",
    "huge_behaviour_ratio_clamp",
    "behaviour_neg_inf",
)
def decoupled_ppo(case: Case) -> Outputs:
    chosen = case.settings["rejection_sampling"]
    correction = CorrectionSettings(mode="none") if chosen is None else weights_of(chosen)
    proximal, behaviour, advantages = (
        case.flat(name) for name in ("proximal_log_prob", "behaviour_log_prob", "advantages")
    )
    log_probs = case.flat("log_prob").requires_grad_()
    ids, rows = sequence_ids(case), case.lengths.numel()
    tokens = case.tokens(behaviour_log_probs=behaviour, proximal_log_probs=proximal, advantages=advantages)
    anchor, weights = anchor_and_weights(log_probs, tokens, correction)
    rules = CorrectionSettings(reject=rule_of(chosen) if chosen is not None and chosen["action"] == "mask" else {})
    # The peer measures from the proximal policy to the behaviour policy: our rules with the two exchanged.
    kept = rejections(behaviour, proximal, tokens.staleness, ids, rows, rules)
    keep = torch.stack([torch.ones_like(ids, dtype=torch.bool), *kept.values()]).all(0)

    # As in the learner: what is rejected leaves the batch. The peer's denominator is that before rejection.
    left = TokenBatch(
        ids[keep],
        ids[keep].bincount(minlength=rows),
        behaviour[keep],
        advantages[keep],
        tokens.staleness[keep],
        tokens.sequence_rewards,
    )
    bounds: dict[str, Any] = {
        "clip_low": case.settings["eps_clip"],
        "clip_high": case.settings["eps_clip_higher"],
        "dual_clip": case.settings["c_clip"],
    }
    if bounds["clip_high"] is None:
        bounds["clip_high"] = bounds["clip_low"]
    ratios = log_ratio(log_probs.detach(), anchor)[keep]
    if case.settings["importance_sampling_level"] == "sequence":
        left.advantages = sequence_mean(left.advantages, left)
        loss, _ = gspo(log_probs[keep], anchor[keep], left, gradient="sequence", **bounds)
        ratios = sequence_mean(ratios, left)
    else:
        loss, _ = ppo(log_probs[keep], anchor[keep], left, **bounds)
    if weights is not None:
        loss = loss * weights[keep]
    total = aggregate(loss, left, case.counts, "token_mean")
    (gradient,) = torch.autograd.grad(total, log_probs)
    outputs: dict[str, Any] = {"out_loss": total, "out_grad_log_prob": case.padded(gradient)}
    for name, mask in masks(ratios.exp(), left.advantages, bounds).items():
        outputs[name] = case.padded(torch.zeros_like(keep).masked_scatter(keep, mask))
    if weights is not None:
        outputs["out_behave_imp_weight"] = case.padded(torch.where(keep, weights, 0.0))
        clamped = drift_metrics(log_probs, tokens, correction).sums["rollout_corr/truncated_fraction"] / ids.numel()
        outputs["filtered_fraction"] = kept_metrics(kept, ids, rows).get("rollout_rs_masked_fraction", float(clamped))
    return outputs


def masks(ratios: Tensor, advantages: Tensor, bounds: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tokens at which clip and dual clip decide, bool [R]."""
    free = clipped_surrogate(ratios, advantages, math.inf, math.inf)
    clipped = clipped_surrogate(ratios, advantages, bounds["clip_low"], bounds["clip_high"])
    dual, _ = dual_clipped(clipped, advantages, bounds["dual_clip"])
    return {"out_clip_mask": clipped > free, "out_dual_clip_mask": dual < clipped}


def weights_of(chosen: Mapping[str, Any]) -> CorrectionSettings:
    """The behaviour weights: clamped, or as they are where tokens are masked instead."""
    whole = chosen["level"] == "sequence" and chosen["metric"] == "ratio"
    level: Any = "geometric" if whole else "token"
    if chosen["action"] == "mask":
        return CorrectionSettings(level=level, cap=math.inf)
    return CorrectionSettings(level=level, cap=chosen["upper"], floor=chosen.get("lower") or 0.0)


def rule_of(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The peer's bounds as a rule of ours, on exchanged policies."""
    scope = "token" if chosen["level"] == "token" else f"seq_{chosen['agg']}"
    low, high = chosen.get("lower"), chosen["upper"]
    if chosen["metric"] == "ratio":
        return {f"{scope}_k1": [low or 0.0, high]}
    kind = chosen["metric"].removeprefix("kl_")
    if kind == "k1":
        return {f"{scope}_k1": [0.0 if low is None else math.exp(low), math.exp(high)]}
    return {f"{scope}_{kind}": high}


@adapter("C_decoupled_ppo", "areal", "proximal_logp_approximation")
def approximation(case: Case) -> Outputs:
    current, behaviour, versions = (case.rows(name) for name in ("log_prob", "behaviour_log_prob", "versions"))
    # Versions below 0 are prompts: nothing to interpolate, as for a token of the current version.
    age = torch.where(versions < 0, 0, case.settings["current_version"] - versions)
    return {
        "out_loglinear": interpolated_proximal(current, behaviour, age, "loglinear"),
        "out_linear": interpolated_proximal(current, behaviour, age, "linear"),
        "out_rollout": interpolated_proximal(current, behaviour, age, "behaviour"),
    }


@adapter("C_decoupled_ppo", "areal", "m2po_mask")
def second_moment(case: Case) -> Outputs:
    settings = CorrectionSettings(second_moment=case.settings["m2_threshold"])
    ids = sequence_ids(case)
    proximal, behaviour = case.flat("proximal_log_prob"), case.flat("behaviour_log_prob")
    kept = rejections(proximal, behaviour, torch.zeros_like(ids), ids, case.lengths.numel(), settings)
    return {"out_mask": case.padded(kept["second_moment"])}
