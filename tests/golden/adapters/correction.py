"""Weights, rejection and diagnostics of the rollout correction."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollmesh.learner.algorithms.correction import (
    CorrectionSettings,
    diagnostics,
    importance_weights,
    kept_metrics,
    rejections,
    rule_metrics,
    weight_metrics,
)
from tests.golden.adapters import adapter
from tests.golden.case import Case, Outputs


def sequence_ids(case: Case) -> Tensor:
    """int64 [R], the row of every token."""
    lengths = case.lengths
    return torch.repeat_interleave(torch.arange(lengths.numel()), lengths)


@adapter(
    "C_rollout_correction",
    "trl",
    "vllm_is_token_truncate",
    "vllm_is_token_mask",
    "vllm_is_sequence_truncate",
    "vllm_is_sequence_mask",
)
def trl_weights(case: Case) -> Outputs:
    level, _, action = case.settings["mode"].partition("_")
    settings = CorrectionSettings(
        mode="truncated_is" if action == "truncate" else "masked_is",
        level=level,
        floor=case.settings["clip_min"] or 0.0,
        cap=case.settings["clip_max"] if case.settings["clip_max"] is not None else float("inf"),
    )
    train, rollout = case.flat("train_log_prob"), case.flat("rollout_log_prob")
    rows = case.lengths.numel()
    if level == "token":
        return {"out_ratio": case.padded(importance_weights(train, rollout, sequence_ids(case), rows, settings))}
    # One number per row, also for rows without tokens: a token of ratio 1 more in every row changes none.
    more = torch.arange(rows)
    ones = train.new_zeros(rows)
    ids, order = torch.cat((sequence_ids(case), more)).sort(stable=True)
    weights = importance_weights(
        torch.cat((train, ones))[order], torch.cat((rollout, ones))[order], ids, rows, settings
    )
    last = ids.bincount(minlength=rows).cumsum(0) - 1
    return {"out_ratio": weights[last][:, None]}


def verl_settings(hyperparameters: Any) -> CorrectionSettings:
    """verl's `rollout_is`, `rollout_rs` and their thresholds in our words."""
    arguments: dict[str, Any] = {"mode": "none"}
    if hyperparameters.get("rollout_is"):
        threshold = hyperparameters["rollout_is_threshold"]
        arguments["level"] = hyperparameters["rollout_is"]
        if isinstance(threshold, str) and "_" in threshold:
            arguments["mode"] = "masked_is"
            arguments["floor"], arguments["cap"] = map(float, threshold.split("_"))
        else:
            arguments["mode"] = "truncated_is"
            arguments["cap"] = float(threshold)
        arguments["normalize"] = bool(hyperparameters.get("rollout_is_batch_normalize"))
    if hyperparameters.get("rollout_rs"):
        rules = hyperparameters["rollout_rs"].split(",")
        thresholds = str(hyperparameters["rollout_rs_threshold"]).split(",")
        arguments["reject"] = dict(zip(rules, thresholds, strict=True))
    return CorrectionSettings(**arguments)


@adapter(
    "C_rollout_correction",
    "verl",
    "tis_token",
    "tis_sequence",
    "tis_token_batchnorm",
    "tis_sequence_batchnorm",
    "icepop_token",
    "icepop_sequence",
    *(f"rs_{scope}_{kind}" for scope in ("token", "seq_sum", "seq_mean", "seq_max") for kind in ("k1", "k2", "k3")),
    "rs_k1_single_number",
    "rs_combined_with_is",
    "offpolicy_metrics",
    "huge_tis_token",
    "huge_tis_sequence",
    "huge_veto_like",
)
def verl_correction(case: Case) -> Outputs:
    settings = verl_settings(case.settings)
    train, rollout = case.flat("train_log_prob"), case.flat("rollout_log_prob")
    ids, rows = sequence_ids(case), case.lengths.numel()
    kept = rejections(train, rollout, torch.zeros_like(ids), ids, rows, settings)
    outputs: dict[str, Any] = {"out_response_mask": np.asarray(case.mask, dtype=np.float64)}
    for keep in kept.values():
        outputs["out_response_mask"] = outputs["out_response_mask"] * case.padded(keep)
    metrics = diagnostics(train, rollout, ids, rows)
    metrics |= rule_metrics(train, rollout, ids, rows, settings) | kept_metrics(kept, ids, rows)
    if settings.weighs:
        outputs["out_rollout_is_weights"] = case.padded(importance_weights(train, rollout, ids, rows, settings))
        metrics |= weight_metrics(train, rollout, ids, rows, settings)
    return outputs | metrics
