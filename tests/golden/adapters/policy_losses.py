"""Policy losses: ours under the settings of a peer's case, aggregated and counted as the peer does.

Here stand layout, the peers' normalizers and names. Metrics that a peer takes per row come from calling the loss on
that row alone, as a micro-batch of one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollmesh.learner.algorithms.aggregation import aggregate, read_aggregation
from rollmesh.learner.algorithms.kl import kl_estimate
from rollmesh.learner.algorithms.losses.modifiers import top_entropy_selection
from rollmesh.learner.algorithms.losses.preference import dpo_ipo, dpo_sigmoid
from rollmesh.learner.algorithms.losses.soft import gamma_weights
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.numerics import log_ratio
from rollmesh.learner.algorithms.ragged import segment_mean, segment_sum
from rollmesh.learner.algorithms.registry import build_policy_loss
from rollmesh.learner.algorithms.settings import Component
from rollmesh.learner.algorithms.types import GlobalCounts, StepView, TokenBatch
from tests.golden.adapters import adapter
from tests.golden.case import Case, Outputs, Unrecorded


@dataclass
class Evaluated:
    """A case's token losses under one of our losses.

    Attributes:
        case: which one.
        loss: name and settings.
        log_probs: [R], leaf.
        anchor: [R].
        tokens: the whole case as a micro-batch.
        token_loss: [R].
        metrics: of the whole case.
    """

    case: Case
    loss: Component
    log_probs: Tensor
    anchor: Tensor
    tokens: TokenBatch
    token_loss: Tensor = field(init=False)
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        function, select, _ = build_policy_loss(self.loss)
        if select is not None:
            entropy = torch.zeros_like(self.anchor)
            view = StepView(self.log_probs.detach(), entropy, self.anchor, self.tokens.advantages)
            self.tokens.selected = select(view)
        self.token_loss, self.metrics = function(self.log_probs, self.anchor, self.tokens)

    @property
    def ratios(self) -> Tensor:
        """pi / pi_anchor, [R], with gradient."""
        return log_ratio(self.log_probs, self.anchor).exp()

    def mean(self, name: str) -> float:
        """A metric over all tokens."""
        return float(self.metrics.sums[name]) / max(self.log_probs.numel(), 1)

    def rows(self, name: str, *, mean: bool = True) -> Tensor:
        """A metric of every row alone [B], its mean over the row's tokens, or its sum; 0 for rows without tokens."""
        function, _, _ = build_policy_loss(self.loss)
        sums = []
        for row, length in enumerate(self.tokens.sequence_lengths.tolist()):
            own = self.tokens.sequence_ids == row
            _, metrics = function(self.log_probs[own].detach(), self.anchor[own], self._row(row, own))
            sums.append(metrics.sums[name].double() / (max(length, 1) if mean else 1))
        return torch.stack(sums)

    def _row(self, row: int, own: Tensor) -> TokenBatch:
        tokens = self.tokens
        return TokenBatch(
            sequence_ids=torch.zeros_like(tokens.sequence_ids[own]),
            sequence_lengths=tokens.sequence_lengths[row : row + 1],
            behaviour_log_probs=tokens.behaviour_log_probs[own],
            advantages=tokens.advantages[own],
            staleness=tokens.staleness[own],
            sequence_rewards=tokens.sequence_rewards[row : row + 1],
            selected=None if tokens.selected is None else tokens.selected[own],
        )

    def aggregated(self, token_loss: Tensor, mode: str, counts: GlobalCounts, horizon: float = 1.0) -> Tensor:
        """The loss, 0-d."""
        return aggregate(token_loss, self.tokens, counts, read_aggregation(mode), horizon)

    def outputs(self, loss: Tensor, metrics: Mapping[str, Any]) -> Outputs:
        """Loss, gradient and metrics; nothing in `loss` may have been differentiated before."""
        loss.backward()
        assert self.log_probs.grad is not None
        gradient = self.case.padded(self.log_probs.grad)
        return {"out_loss": loss.detach(), "out_grad_log_prob": gradient, **metrics}


def evaluate(
    case: Case,
    name: str,
    settings: Mapping[str, Any],
    fields: Mapping[str, Tensor] | None = None,
    *,
    anchor: Tensor | None = None,
) -> Evaluated:
    """Calls one of our losses on a whole case.

    Args:
        case: its `log_prob`, and `advantages` per token or per row.
        name, settings: the loss.
        fields: of the micro-batch, in place of the case's.
        anchor: log-probs of the ratio's denominator [R]; none: the case's `old_log_prob`.
    """
    log_probs = case.flat("log_prob").requires_grad_()
    rows = case.tokens().sequence_ids
    given = case.inputs["advantages"]
    advantages = case.rows("advantages")[rows] if given.ndim == 1 else case.flat("advantages")
    tokens = case.tokens(**({"advantages": advantages} | dict(fields or {})))
    return Evaluated(
        case, Component(name, settings), log_probs, case.flat("old_log_prob") if anchor is None else anchor, tokens
    )


def all_rows(case: Case) -> GlobalCounts:
    """Counts of peers that count rows without tokens as sequences."""
    counts = case.counts
    return GlobalCounts(counts.tokens, case.lengths.numel())


# --- verl -----------------------------------------------------------------------------------------------------------

VERL_CLIP = {"clip_ratio_low": "clip_low", "clip_ratio_high": "clip_high"}
VERL_METRICS = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")


def renamed(case: Case, names: Mapping[str, str]) -> dict[str, Any]:
    """Hyperparameters under our names."""
    return {ours: case.settings[theirs] for theirs, ours in names.items()}


def verl(case: Case, run: Evaluated, mode: str | None = None, *, every_row: bool = False) -> Outputs:
    """Weights, aggregation and metrics as in verl's actor.

    Args:
        case, run: the case under our loss.
        mode: aggregation, where the peer does not follow the case's.
        every_row: rows without tokens count as sequences.
    """
    weights = case.inputs.get("rollout_is_weights")
    token_loss = run.token_loss
    if weights is not None:
        token_loss = token_loss * case.flat("rollout_is_weights")
    counts, scale, horizon = all_rows(case) if every_row else case.counts, 1, float(case.inputs["log_prob"].shape[1])
    whole = case.settings.get("global_batch_info")
    if whole:
        counts = GlobalCounts(whole["batch_num_tokens"], whole["global_batch_size"])
        scale, horizon = whole["dp_size"], whole["loss_scale_factor"] or horizon
    loss = scale * run.aggregated(token_loss, mode or case.settings["loss_agg_mode"], counts, horizon)
    known = run.metrics.sums
    return run.outputs(loss, {name: run.mean(name) if name in known else 0.0 for name in VERL_METRICS})


@adapter(
    "B_policy_loss",
    "verl",
    "vanilla",
    "vanilla_dual_clip_negative_adv",
    "vanilla_global_batch",
    "vanilla_huge_ratio",
    "vanilla_neg_inf",
    "vanilla_with_is_weights",
)
def verl_ppo(case: Case) -> Outputs:
    return verl(case, evaluate(case, "ppo", renamed(case, VERL_CLIP | {"clip_ratio_c": "dual_clip"})))


@adapter("B_policy_loss", "verl", "gspo", "gspo_huge_ratio", "gspo_token_advantage")
def verl_gspo(case: Case) -> Outputs:
    return verl(case, evaluate(case, "gspo", renamed(case, VERL_CLIP)), "seq-mean-token-mean")


@adapter("B_policy_loss", "verl", "geo_mean")
def verl_gmpo(case: Case) -> Outputs:
    run = evaluate(case, "gmpo", renamed(case, VERL_CLIP))
    weights = case.inputs.get("rollout_is_weights")
    if weights is not None:
        # The peer's weights of a sequence are the geometric mean of its tokens'.
        ids, rows = run.tokens.sequence_ids, run.tokens.num_sequences
        means = segment_mean(case.flat("rollout_is_weights").log(), ids, rows)
        run.token_loss = run.token_loss * means.exp()[ids]
    loss = run.aggregated(run.token_loss, "seq-mean-token-mean", all_rows(case))
    return run.outputs(loss, {name: run.mean(name) for name in VERL_METRICS})


@adapter("B_policy_loss", "verl", "cispo", "cispo_huge_ratio")
def verl_cispo(case: Case) -> Outputs:
    return verl(case, evaluate(case, "cispo", renamed(case, VERL_CLIP)))


@adapter("B_policy_loss", "verl", "sapo")
def verl_sapo(case: Case) -> Outputs:
    settings = renamed(case, {"tau_pos": "tau_positive", "tau_neg": "tau_negative"})
    return verl(case, evaluate(case, "sapo", settings), "seq-mean-token-mean")


@adapter("B_policy_loss", "verl", "gpg")
def verl_gpg(case: Case) -> Outputs:
    return verl(case, evaluate(case, "gpg", {}))


@adapter("B_policy_loss", "verl", "dro")
def verl_dro(case: Case) -> Outputs:
    return verl(case, evaluate(case, "dro", renamed(case, {"dro_beta": "beta"})))


@adapter("B_policy_loss", "verl", "clip_cov")
def verl_clip_cov(case: Case) -> Outputs:
    names = {"clip_cov_ratio": "share", "clip_cov_lb": "covariance_low", "clip_cov_ub": "covariance_high"}
    return verl(case, evaluate(case, "clip_cov", renamed(case, VERL_CLIP | names)))


@adapter("B_policy_loss", "verl", "kl_cov")
def verl_kl_cov(case: Case) -> Outputs:
    run = evaluate(case, "kl_cov", renamed(case, {"kl_cov_ratio": "share", "ppo_kl_coef": "coefficient"}))
    return {**verl(case, run), "actor/ppo_kl": run.mean("actor/ppo_kl_abs")}


@adapter("B_policy_loss", "verl", "dppo_tv", "dppo_tv_huge_ratio")
def verl_dppo_tv(case: Case) -> Outputs:
    return verl(case, evaluate(case, "dppo_tv", renamed(case, VERL_CLIP | {"clip_ratio_c": "ratio_cap"})))


@adapter("B_policy_loss", "verl", "dppo_kl", "dppo_kl_huge_ratio")
def verl_dppo_kl(case: Case) -> Outputs:
    return verl(case, evaluate(case, "dppo_kl", renamed(case, VERL_CLIP | {"clip_ratio_c": "ratio_cap"})))


# --- TRL ------------------------------------------------------------------------------------------------------------


@adapter(
    "B_policy_loss",
    "trl",
    "grpo",
    "bnpo",
    "dapo",
    "dr_grpo",
    "luspo",
    "cispo",
    "sapo",
    "vespo",
    "gspo_sequence",
    "two_sided_delta",
    "top_entropy",
    "entropy_bonus",
    "with_kl",
)
def trl_loss(case: Case) -> Outputs:
    run = trl_evaluate(case)
    return trl_outputs(case, run, run.token_loss)


def trl_evaluate(case: Case, fields: Mapping[str, Tensor] | None = None, *, anchor: Tensor | None = None) -> Evaluated:
    """Our loss of a TRL `loss_type`."""
    settings = case.settings
    kind = settings["loss_type"]
    if kind == "cispo":
        # TRL's epsilon_high is the cap itself.
        return evaluate(
            case, "cispo", {"clip_low": 1.0, "clip_high": settings["epsilon_high"] - 1.0}, fields, anchor=anchor
        )
    if kind == "sapo":
        names = {"sapo_temperature_pos": "tau_positive", "sapo_temperature_neg": "tau_negative"}
        level = {"level": settings["importance_sampling_level"]}
        return evaluate(case, "sapo", renamed(case, names) | level, fields, anchor=anchor)
    if kind == "vespo":
        names = {f"vespo_{p}_{short}": f"{p}_{long}" for p in ("k", "lambda") for short, long in SIGNS}
        return evaluate(case, "vespo", renamed(case, names), fields, anchor=anchor)
    clip = renamed(case, {"epsilon_low": "clip_low", "epsilon_high": "clip_high"})
    if settings["importance_sampling_level"] == "sequence":
        return evaluate(case, "gspo", clip | {"gradient": "sequence"}, fields, anchor=anchor)
    return evaluate(
        case, "ppo", clip | {"dual_clip": None, "two_sided_delta": settings["delta"]}, fields, anchor=anchor
    )


SIGNS = (("pos", "positive"), ("neg", "negative"))


def trl_outputs(case: Case, run: Evaluated, token_loss: Tensor) -> Outputs:
    """KL term, entropy, normalizers and metrics as in TRL's trainer."""
    settings = case.settings
    metrics: dict[str, Any] = {}
    entropy = case.flat("entropy") if "entropy" in case.inputs else None
    if settings["top_entropy_quantile"] < 1.0:
        assert entropy is not None
        view = StepView(run.log_probs.detach(), entropy, run.anchor, run.tokens.advantages)
        token_loss = token_loss * top_entropy_selection(view, quantile=settings["top_entropy_quantile"])
    if settings["beta"]:
        distance = kl_estimate(run.log_probs, case.flat("ref_log_prob"), "k3", bound=math.inf)
        if settings["use_bias_correction_kl"]:
            distance = distance * run.ratios
        token_loss = token_loss + settings["beta"] * distance
        metrics["kl"] = distance.detach().mean()
    loss = trl_aggregate(case, run, token_loss, trl_mode(case))
    if settings["entropy_coef"]:
        assert entropy is not None
        metrics |= {
            "policy_loss": loss.detach() * trl_accumulation(case),
            "entropy_coef": settings["entropy_coef"],
        }
        # Divided as the loss is where that is by all tokens of the batch, else a mean over the local ones.
        mode = "dapo" if trl_mode(case) == "dapo" else "bnpo"
        loss = loss - settings["entropy_coef"] * trl_aggregate(case, run, entropy, mode)
    metrics["entropy"] = Unrecorded("the entropies that it averages") if entropy is None else entropy.mean()
    return run.outputs(loss, metrics | trl_metrics(case, run))


def trl_accumulation(case: Case) -> float:
    """Micro-batches that share the loss, where the loss type divides by them."""
    return 1.0 if trl_mode(case) == "dapo" else float(case.settings["grad_accum"])


def trl_mode(case: Case) -> str:
    """The aggregation of a loss type, under TRL's name."""
    kind: str = case.settings["loss_type"]
    return {"cispo": "dapo", "vespo": "dapo", "sapo": "grpo"}.get(kind, kind)


def trl_aggregate(case: Case, run: Evaluated, token_loss: Tensor, mode: str) -> Tensor:
    """An aggregation with TRL's counts."""
    settings, counts = case.settings, all_rows(case)
    if mode == "dapo":
        counts = GlobalCounts(settings["num_items_in_batch"], counts.sequences)
    loss = run.aggregated(token_loss, mode, counts, float(settings["max_completion_length"]))
    return loss / trl_accumulation(case)


def trl_metrics(case: Case, run: Evaluated) -> dict[str, Any]:
    """Clip fractions: over tokens, or over rows where the ratio is the row's; extremes over rows."""
    if "cispo_clip_ratio" in run.metrics.sums:
        return {"cispo_clip_ratio": run.mean("cispo_clip_ratio")}
    if "vespo/phi" in run.metrics.sums:
        return {"vespo/phi_seq_mean": trl_phi(run).mean()}
    names = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
    if names[0] not in run.metrics.sums:
        return {}
    rows = {name: run.rows(name) for name in names}
    if run.loss.name == "gspo":
        means: dict[str, Any] = {name: values.mean() for name, values in rows.items()}
    else:
        means = {name: run.mean(name) for name in names}
    return means | {"clip_ratio/low_min": rows[names[0]].min(), "clip_ratio/high_max": rows[names[1]].max()}


def trl_phi(run: Evaluated) -> Tensor:
    """VESPO's weight of every row, also of rows without tokens, [B]."""
    ids, rows = run.tokens.sequence_ids, run.tokens.num_sequences
    total = segment_sum(log_ratio(run.log_probs.detach(), run.anchor), ids, rows)
    positive = torch.from_numpy(run.case.inputs["advantages"] >= 0)
    shape, rate = (
        torch.full_like(total, run.loss.params[f"{name}_negative"]).masked_fill(
            positive, run.loss.params[f"{name}_positive"]
        )
        for name in ("k", "lambda")
    )
    return gamma_weights(total, shape, rate)


# --- slime ----------------------------------------------------------------------------------------------------------


@adapter(
    "B_policy_loss",
    "slime",
    "ppo_clip",
    "ppo_dual_clip",
    "gspo",
    "cispo",
    "kl_loss_k1",
    "kl_loss_k2",
    "kl_loss_k3",
    "kl_loss_low_var_kl",
)
def slime_loss(case: Case) -> Outputs:
    run = slime_evaluate(case)
    return slime_outputs(case, run, run.token_loss, {})


def slime_evaluate(case: Case) -> Evaluated:
    """Our loss of a slime `advantage_estimator`."""
    settings = renamed(case, {"eps_clip": "clip_low", "eps_clip_high": "clip_high"})
    estimator = case.settings["advantage_estimator"]
    fields = {"behaviour_log_probs": case.flat("rollout_log_prob")}
    if estimator == "cispo":
        return evaluate(case, "cispo", settings, fields)
    settings["dual_clip"] = case.settings["eps_clip_c"]
    if estimator == "gspo":
        return evaluate(case, "gspo", settings | {"gradient": "sequence"}, fields)
    return evaluate(case, "ppo", settings, fields)


def slime_sum(case: Case, run: Evaluated, values: Tensor) -> Tensor:
    """The peer's reduction of values per token: sum over rows of row means, or over tokens."""
    if case.settings["calculate_per_token_loss"]:
        return run.aggregated(values, "token_sum", case.counts)
    return run.aggregated(values, "seq_mean_token_mean", case.counts) * case.counts.sequences


def slime_outputs(case: Case, run: Evaluated, token_loss: Tensor, metrics: Mapping[str, Any]) -> Outputs:
    """Entropy and KL terms, normalizers and metrics as in slime's trainer."""
    settings = case.settings
    found: dict[str, Any] = dict(metrics)
    loss = slime_sum(case, run, token_loss)
    found["pg_loss"] = loss.detach()
    found["entropy_loss"] = Unrecorded("the entropies that it sums")
    if "entropy" in case.inputs:
        entropy = slime_sum(case, run, case.flat("entropy"))
        found["entropy_loss"] = entropy
        loss = loss - settings["entropy_coef"] * entropy
    if settings["use_kl_loss"]:
        # slime cuts only what it calls low_var_kl.
        bound = None if settings["kl_loss_type"] == "low_var_kl" else math.inf
        distance = kl_estimate(run.log_probs, case.flat("ref_log_prob"), settings["kl_loss_type"], bound=bound)
        if settings["use_unbiased_kl"]:
            distance = distance * run.ratios
        total = slime_sum(case, run, distance)
        found["kl_loss"] = total.detach()
        loss = loss + settings["kl_loss_coef"] * total
    found["loss"] = loss.detach()
    per_token = bool(settings["calculate_per_token_loss"])
    for theirs, ours in (("pg_clipfrac", "actor/pg_clipfrac"), ("ppo_kl", "actor/ppo_kl")):
        found[theirs] = run.rows(ours, mean=not per_token).sum()
    apart = kl_estimate(run.anchor, run.tokens.behaviour_log_probs, "abs")
    found["train_rollout_logprob_abs_diff"] = slime_sum(case, run, apart)
    return run.outputs(loss, found)


# --- AReaL ----------------------------------------------------------------------------------------------------------


@adapter("B_policy_loss", "areal", "sapo_token", "sapo_sequence")
def areal_sapo(case: Case) -> Outputs:
    names = {"tau_pos": "tau_positive", "tau_neg": "tau_negative", "importance_sampling_level": "level"}
    run = evaluate(case, "sapo", renamed(case, names))
    return run.outputs(run.aggregated(run.token_loss, "token_mean", case.counts), {})


@adapter("B_policy_loss", "areal", "dpo_sigmoid", "dpo_ipo")
def areal_preference(case: Case) -> Outputs:
    margins = case.rows("logits").requires_grad_()
    function = dpo_ipo if case.settings["loss_type"] == "ipo" else dpo_sigmoid
    loss = function(margins, beta=case.settings["beta"])
    loss.sum().backward()
    return {"out_loss": loss.detach(), "out_grad_logits": margins.grad}
