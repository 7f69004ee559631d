"""Policy losses with what the peers do about tokens that another policy sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Categorical

from rollmesh.learner.algorithms.aggregation import aggregate
from rollmesh.learner.algorithms.correction import (
    CorrectionSettings,
    diagnostics,
    importance_weights,
    kept_metrics,
    rejections,
    rule_metrics,
    weight_metrics,
)
from rollmesh.learner.algorithms.kl import kl_estimate
from rollmesh.learner.algorithms.losses.modifiers import off_policy_sequence_keep
from rollmesh.learner.algorithms.numerics import log_ratio
from rollmesh.learner.algorithms.settings import Component
from rollmesh.learner.algorithms.types import GlobalCounts, TokenBatch
from tests.golden.adapters import adapter
from tests.golden.adapters.correction import verl_settings
from tests.golden.adapters.policy_losses import (
    VERL_CLIP,
    VERL_METRICS,
    Evaluated,
    renamed,
    slime_evaluate,
    slime_outputs,
    slime_sum,
    trl_evaluate,
    trl_outputs,
)
from tests.golden.case import Case, Outputs

Mask = NDArray[np.bool_]


def component(
    case: Case,
    log_probs: Tensor,
    mask: Mask,
    name: str,
    settings: Mapping[str, Any],
    anchor: str,
    advantages: Tensor | None = None,
) -> Evaluated:
    """One of our losses on the tokens of any mask.

    Args:
        case: what `anchor` and, where they are not given, the advantages are inputs of, [B, T].
        log_probs: [B, T], leaf.
        mask: [B, T], the tokens.
        name, settings: the loss.
        anchor: input with the log-probs of the ratio's denominator.
        advantages: [B, T].
    """
    chosen = torch.from_numpy(mask)
    rows = torch.from_numpy(np.nonzero(mask)[0])
    given = case.rows("advantages") if advantages is None else advantages
    tokens = TokenBatch(
        sequence_ids=rows,
        sequence_lengths=chosen.sum(1),
        behaviour_log_probs=case.rows(anchor)[chosen],
        advantages=given[chosen],
        staleness=torch.zeros_like(rows, dtype=torch.int32),
        sequence_rewards=given.new_zeros(len(mask)),
    )
    return Evaluated(case, Component(name, settings), log_probs[chosen], case.rows(anchor)[chosen], tokens)


def response(case: Case) -> Mask:
    """The case's mask; it has one."""
    assert case.mask is not None
    return case.mask


# --- verl: no proximal policy, the rollout's log-probs anchor ---------------------------------------------------------


def verl_bypass(case: Case, name: str, settings: Mapping[str, Any], *, weighted: bool) -> Outputs:
    """Rejection takes tokens out of the mask; metrics compare the current policy with the rollout's."""
    correction = verl_settings(case.settings)
    current, rollout = case.flat("log_prob"), case.flat("rollout_log_prob")
    tokens = case.tokens()
    ids, rows = tokens.sequence_ids, tokens.num_sequences
    kept = rejections(current, rollout, tokens.staleness, ids, rows, correction)
    keep = torch.stack([*kept.values(), torch.ones_like(ids, dtype=torch.bool)]).all(0)
    mask = response(case).copy()
    mask[mask] = keep.numpy()

    leaf = case.rows("log_prob").requires_grad_()
    run = component(case, leaf, mask, name, settings, "rollout_log_prob")
    metrics = diagnostics(current, rollout, ids, rows)
    metrics |= rule_metrics(current, rollout, ids, rows, correction) | kept_metrics(kept, ids, rows)
    token_loss = run.token_loss
    if correction.weighs:
        metrics |= weight_metrics(current, rollout, ids, rows, correction)
        # The peer adds 1e-8 to the mean that it divides by, which shows in means of a few tokens.
        metrics["rollout_is_eff_sample_size"] *= (1.0 + 1e-8 / max(metrics["rollout_is_mean"], 1e-8)) ** 2
        if weighted:
            token_loss = token_loss * importance_weights(current, rollout, ids, rows, correction)[keep]
    lengths = run.tokens.sequence_lengths
    counts = GlobalCounts(int(lengths.sum()), int((lengths > 0).sum()))
    loss = run.aggregated(token_loss, case.settings["loss_agg_mode"], counts, float(mask.shape[1]))
    loss.backward()
    actor = {metric: run.mean(metric) for metric in VERL_METRICS if metric in run.metrics.sums}
    corrected = {f"rollout_corr/{metric}": value for metric, value in metrics.items()}
    return {"out_loss": loss.detach(), "out_grad_log_prob": leaf.grad, **actor, **corrected}


@adapter("C_offpolicy_loss", "verl", "bypass_ppo_clip")
def verl_bypass_ppo(case: Case) -> Outputs:
    return verl_bypass(case, "ppo", renamed(case, VERL_CLIP | {"clip_ratio_c": "dual_clip"}), weighted=False)


@adapter("C_offpolicy_loss", "verl", "bypass_reinforce")
def verl_bypass_reinforce(case: Case) -> Outputs:
    return verl_bypass(case, "reinforce", {}, weighted=True)


# --- TRL ------------------------------------------------------------------------------------------------------------


@adapter(
    "C_offpolicy_loss",
    "trl",
    "loss_with_vllm_is_token_truncate",
    "loss_with_vllm_is_token_mask",
    "loss_with_vllm_is_sequence_truncate",
    "loss_with_vllm_is_sequence_mask",
)
def trl_weighted(case: Case) -> Outputs:
    run = trl_evaluate(case)
    return trl_outputs(case, run, run.token_loss * case.flat("importance_sampling_ratio"))


@adapter("C_offpolicy_loss", "trl", "off_policy_sequence_mask")
def trl_sequence_mask(case: Case) -> Outputs:
    sampler = case.flat("sampling_log_prob") if "sampling_log_prob" in case.inputs else case.flat("old_log_prob")
    run = trl_evaluate(case, {"behaviour_log_probs": sampler})
    keep = off_policy_sequence_keep(run.log_probs, run.tokens, case.settings["off_policy_mask_threshold"])
    return trl_outputs(case, run, run.token_loss * keep)


@adapter("C_offpolicy_loss", "trl", "vespo_with_is")
def trl_vespo(case: Case) -> Outputs:
    # The weight is a ratio to the sampler: the sampler anchors, and no further weight is needed. A row's one ratio is
    # spread over its tokens.
    log_ratios = case.flat("importance_sampling_ratio").clamp(min=1e-8).log()
    if case.inputs["importance_sampling_ratio"].shape[1] == 1:
        log_ratios = log_ratios / case.lengths[case.tokens().sequence_ids]
    run = trl_evaluate(case, anchor=case.flat("old_log_prob") - log_ratios)
    return trl_outputs(case, run, run.token_loss)


# --- slime ----------------------------------------------------------------------------------------------------------


@adapter("C_offpolicy_loss", "slime", "tis_truncate", "tis_icepop")
def slime_weighted(case: Case) -> Outputs:
    run, settings = slime_evaluate(case), case.settings
    correction = CorrectionSettings(
        mode="masked_is" if settings["tis_mode"] == "icepop" else "truncated_is",
        floor=settings["tis_clip_low"],
        cap=settings["tis_clip"],
    )
    behaviour, tokens = run.tokens.behaviour_log_probs, run.tokens
    weights = importance_weights(run.anchor, behaviour, tokens.sequence_ids, tokens.num_sequences, correction)
    free = log_ratio(run.anchor, behaviour).exp()
    metrics = {
        "ois": slime_sum(case, run, run.ratios.detach()),
        "tis": slime_sum(case, run, free),
        "tis_clipfrac": slime_sum(case, run, (weights != free).to(free.dtype)),
        "tis_abs": slime_sum(case, run, (free - 1.0).abs()),
    }
    return slime_outputs(case, run, run.token_loss * weights, metrics)


@adapter("C_offpolicy_loss", "slime", "opsm")
def slime_sequence_mask(case: Case) -> Outputs:
    run = slime_evaluate(case)
    tokens = case.tokens(advantages=run.tokens.advantages, behaviour_log_probs=run.anchor)
    keep = off_policy_sequence_keep(run.log_probs, tokens, case.settings["opsm_delta"])
    dropped = slime_sum(case, run, (~keep).to(run.anchor.dtype))
    return slime_outputs(case, run, run.token_loss * keep, {"opsm_clipfrac": dropped})


# --- prime-rl -------------------------------------------------------------------------------------------------------


@adapter(
    "C_offpolicy_loss",
    "prime-rl",
    "default_dppo_kl",
    "default_huge_ratio",
    "default_scaled",
    "ipo",
    "mixed_rl_ce_refkl",
)
def prime_rl_loss(case: Case) -> Outputs:
    """Up to three components, each over the tokens whose weight is not 0: a policy loss, likelihood, distillation."""
    settings = case.settings
    leaf = case.rows("log_prob").requires_grad_()
    weights = {name: case.rows(f"{name}_weights") for name in STREAMS if f"{name}_weights" in case.inputs}
    mask = response(case)
    if "rl" in weights:
        mask = mask & (case.inputs["rl_weights"] != 0)
    run = component(case, leaf, mask, "probability_band", prime_rl_settings(case), "inference_log_prob")
    loss = prime_rl_sum(run, weights.get("rl"), mask) / settings["rl_scale"]
    metrics = prime_rl_metrics(run, "", rows_with_tokens="rl" in weights)
    if "ce" in weights:
        chosen = case.inputs["ce_weights"] != 0
        likelihood = component(case, leaf, chosen, "reinforce", {}, "inference_log_prob", torch.ones_like(leaf))
        loss = loss + prime_rl_sum(likelihood, weights["ce"], chosen) / settings["ce_scale"]
        metrics["out_metric_nll"] = prime_rl_rows(likelihood, likelihood.token_loss.detach())
    if "ref_kl" in weights:
        chosen = case.inputs["ref_kl_weights"] != 0
        pull = case.rows("ref_log_prob") - leaf.detach()
        band = {"band_low": 0.2, "band_high": None, "by_sign": False, "penalty": 1e-3}
        distilled = component(case, leaf, chosen, "probability_band", band, "inference_log_prob", pull)
        loss = loss + prime_rl_sum(distilled, weights["ref_kl"], chosen) / settings["ref_kl_scale"]
        metrics |= prime_rl_metrics(distilled, "ref_kl__", rows_with_tokens=True)
        metrics["out_metric_ref_kl"] = prime_rl_rows(distilled, distilled.tokens.advantages)
    loss.backward()
    return {"out_loss": loss.detach(), "out_grad_log_prob": leaf.grad, **metrics}


STREAMS = ("rl", "ce", "ref_kl")


def prime_rl_settings(case: Case) -> dict[str, Any]:
    """The band of the `default` or the `ipo` loss."""
    common = renamed(case, {"adv_tau": "advantage_scale", "kl_tau": "penalty"})
    if case.settings["type"] == "ipo":
        threshold = case.settings["ipo_threshold"]
        return common | {"band_low": threshold, "band_high": threshold, "by_sign": False}
    return common | renamed(case, {"dppo_mask_low": "band_low", "dppo_mask_high": "band_high"})


def prime_rl_sum(run: Evaluated, weights: Tensor | None, mask: Mask) -> Tensor:
    """Sum over tokens, weighted."""
    token_loss = run.token_loss if weights is None else run.token_loss * weights[torch.from_numpy(mask)]
    return run.aggregated(token_loss, "token_sum", run.case.counts)


def prime_rl_rows(run: Evaluated, values: Tensor) -> Tensor:
    """Means of values per token over every row that has any."""
    lengths = run.tokens.sequence_lengths
    sums = torch.zeros(len(lengths), dtype=values.dtype).index_add(0, run.tokens.sequence_ids, values)
    return (sums / lengths.clamp_min(1))[lengths > 0]


def prime_rl_metrics(run: Evaluated, prefix: str, *, rows_with_tokens: bool) -> dict[str, Any]:
    """The recorded metrics, one entry per row; means over the row's tokens, or over its dropped or kept ones."""
    lengths = run.tokens.sequence_lengths
    there = lengths > 0 if rows_with_tokens else torch.ones_like(lengths, dtype=torch.bool)
    sums = {name.removeprefix("actor/"): run.rows(name, mean=False) for name in run.metrics.sums}
    dropped = sums["is_masked"]
    denominators = {name: dropped for name in sums if name.startswith("masked_")}
    denominators["unmasked_mismatch_kl"] = lengths - dropped
    names = (name for name in sums if "mask" in name)
    return {
        f"out_metric_{prefix}{name}": (sums[name] / denominators.get(name, lengths).clamp_min(1))[there]
        for name in names
    }


# --- PipelineRL -----------------------------------------------------------------------------------------------------


@adapter("C_offpolicy_loss", "pipelinerl", "rl_step_ppo", "rl_step_reinforce", "rl_step_gspo")
def pipelinerl_step(case: Case) -> Outputs:
    settings = case.settings
    step = PipelineStep(case)
    run = step.run
    values = -run.token_loss
    if settings["policy_loss"] != "gspo":
        within = settings["clamp_log_ratio_ref_new_value"]
        distance = kl_estimate(run.log_probs, step.flat("ref_log_prob"), "k3", bound=math.inf, ratio_bound=within)
        values = values - step.decayed("kl_coef") * distance + step.decayed("entropy_bonus") * step.entropy
    loss = -aggregate(step.weights * values, run.tokens, GlobalCounts(1, 1), "token_sum")
    loss.backward()
    return {"out_loss": loss.detach(), "out_grad_logits": step.logits.grad, **step.metrics()}


class PipelineStep:
    """A case on logits: position t predicts token t + 1; padded rows, or sequences packed into one."""

    def __init__(self, case: Case) -> None:
        self.case, settings = case, case.settings
        self.logits = case.rows("logits").requires_grad_()
        self._mask = torch.from_numpy(case.inputs["labels"][:, 1:] != -100)
        log_probs = torch.log_softmax(self.logits[:, :-1], -1)
        labels = case.rows("input_ids")[:, 1:, None]
        current = log_probs.gather(-1, labels).squeeze(-1)[self._mask]
        self.entropy = Categorical(logits=self.logits[:, :-1][self._mask]).entropy()
        shape = case.inputs["labels"].shape
        rows = np.broadcast_to(np.arange(shape[0])[:, None], shape)
        segments = case.inputs.get("segment_ids", rows)[:, 1:]
        ids = torch.from_numpy(np.ascontiguousarray(segments)).long()[self._mask]
        advantages = self.flat("advantages")
        if settings["relu_log_p_weights"] and settings["policy_loss"] != "gspo":
            advantages = advantages.clamp(min=0.0)
        count = int(segments.max()) + 1
        self.tokens = TokenBatch(
            sequence_ids=ids,
            sequence_lengths=torch.bincount(ids, minlength=count),
            behaviour_log_probs=self.flat("old_log_prob"),
            advantages=advantages,
            staleness=torch.zeros_like(ids, dtype=torch.int32),
            sequence_rewards=advantages.new_zeros(count),
        )
        self.run = self._evaluate(current, self.tokens)

    def _evaluate(self, log_probs: Tensor, tokens: TokenBatch) -> Evaluated:
        low, high = self.case.settings["epsilon_low"], self.case.settings["epsilon_high"]
        component = {
            "ppo": Component("ppo", {"clip_low": low, "clip_high": high, "dual_clip": None}),
            "gspo": Component("gspo", {"clip_low": low, "clip_high": high, "gradient": "sequence"}),
            "reinforce": Component("cispo", {"clip_low": 1.0, "clip_high": high}),
        }[self.case.settings["policy_loss"]]
        return Evaluated(self.case, component, log_probs, self.flat("old_log_prob"), tokens)

    def flat(self, name: str) -> Tensor:
        """An input at the trained tokens, [R]."""
        return self.case.rows(name)[:, 1:][self._mask]

    def decayed(self, name: str) -> float:
        """A coefficient on its way from its initial to its final value."""
        settings = self.case.settings
        first, last = settings[name], settings[f"final_{name}"]
        return float(first + (last - first) * settings["current_step"] / settings["max_step"])

    @property
    def weights(self) -> Tensor:
        """The peer's normalizer of every token, [R]."""
        settings = self.case.settings
        sizes = self.flat("group_tokens")
        weights = 1.0 / (sizes if settings["group_normalization"] else torch.full_like(sizes, settings["batch_size"]))
        return torch.where(self.flat("overflow") != 0, 0.0, weights) if settings["overlong_filtering"] else weights

    def metrics(self) -> dict[str, Any]:
        """Sums over tokens, or over rows of means over the row's labels."""
        settings, run = self.case.settings, self.run
        reference = self.flat("ref_log_prob")
        ratios, drift = run.ratios.detach(), kl_estimate(run.log_probs, run.anchor, "abs")
        if settings["policy_loss"] == "reinforce":
            ratios = ratios.clamp(max=1.0 + settings["epsilon_high"])
        within = settings["clamp_log_ratio_ref_new_value"]
        apart = (reference - run.log_probs).abs() > within
        per_label = {
            "kl": kl_estimate(run.log_probs, reference, "k3", bound=math.inf, ratio_bound=within),
            "kl_new_old": kl_estimate(run.anchor, run.log_probs, "k3", bound=math.inf),
            "entropy": self.entropy,
            "clamp_log_ratio_ref_new_indicator": apart.double(),
            "mean_abs_log_ratio_new_old": drift,
        }
        labels = self.flat("num_labels")
        return {name: (values.detach() / labels).sum() for name, values in per_label.items()} | {
            "ratio_new_old_sum": ratios.sum(),
            "ratio_new_old_squared_sum": ratios.square().sum(),
            "clamp_log_ratio_new_old_indicator": self._outside(),
        }

    def _outside(self) -> Tensor:
        """Tokens whose ratio is out of bounds, whatever their advantage; of the sequences that the peer's loss sums."""
        if self.case.settings["policy_loss"] == "reinforce":
            return self.run.rows("actor/pg_clipfrac").sum()
        ones = torch.ones_like(self.tokens.advantages)
        sides = {"clip_ratio/high_mean": ones, "clip_ratio/low_mean": -ones}
        found = []
        for name, advantages in sides.items():
            fields = {field: getattr(self.tokens, field) for field in self.tokens.__slots__}
            tokens = TokenBatch(**(fields | {"advantages": advantages}))
            found.append(self._evaluate(self.run.log_probs.detach(), tokens).rows(name))
        outside = torch.stack(found).sum(0)
        if self.case.settings["policy_loss"] == "gspo":
            weighed = torch.zeros_like(outside).index_add(0, self.tokens.sequence_ids, self.weights.to(outside.dtype))
            outside = outside * (weighed > 0)
        return outside.sum()
