"""Every metric of a run: its meaning, its unit, and its names in verl and TRL.

Invariants: everything that a run writes is described here. A metric has its peers' name wherever one of them measures
the same, and a name here never means another metric there. A name may stand for several: `<...>` for any text
without a slash, as in `rewards/<function>/mean`, and `{a,b}` for one of the words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_PLACEHOLDER = re.compile(r"<(\w+)>|\{([\w,]*)\}")


@dataclass(frozen=True)
class Metric:
    """A metric, or a family of metrics.

    Attributes:
        name: as written, with `<...>` and `{...}` as above.
        meaning: in a sentence.
        unit: tokens, s, nats, share (0 .. 1) ...; empty: a plain number or a count.
        aliases: further names under which the same value is written, with the same `<...>`.
        verl, trl: the name in that project's logs, or which of several it has; empty: it has none.
    """

    name: str
    meaning: str
    unit: str = ""
    aliases: tuple[str, ...] = ()
    verl: str = ""
    trl: str = ""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the names that it describes."""
        return re.compile(_PLACEHOLDER.sub(_group, self.name))

    def aliases_of(self, name: str) -> Iterator[str]:
        """The aliases of a name that it describes."""
        match = self.pattern.fullmatch(name)
        if match is None:
            return
        for alias in self.aliases:
            yield re.sub(r"<(\w+)>", lambda part: match[part[1]], alias)


def _group(placeholder: re.Match[str]) -> str:
    if placeholder[1]:
        return f"(?P<{placeholder[1]}>[^/]+)"
    return f"(?:{placeholder[2].replace(',', '|')})"


def _verl(name: str, meaning: str, unit: str = "", trl: str = "") -> Metric:
    """A metric under verl's name; where TRL has another for the same metric, it is written under both."""
    return Metric(name, meaning, unit, (trl,) if trl and trl != name else (), name, trl)


def _trl(name: str, meaning: str, unit: str = "") -> Metric:
    """A metric that only TRL has a name for."""
    return Metric(name, meaning, unit, trl=name)


def _distribution(name: str, meaning: str, unit: str = "", verl: str = "") -> Metric:
    """The metrics of `learner.algorithms.metrics.distribution`; the p are quantiles."""
    return Metric(f"{name}/{{mean,std,min,max,p25,p50,p75}}", meaning, unit, verl=verl)


REWARDS = [
    _verl("critic/score/mean", "Mean reward of the responses, as scored.", trl="reward"),
    Metric("critic/score/std", "Standard deviation of the rewards over the batch."),
    _verl("critic/score/max", "Largest reward."),
    _verl("critic/score/min", "Smallest reward."),
    _trl("rewards/<function>/mean", "Mean of one reward function or component."),
    _trl("rewards/<function>/std", "Its standard deviation over the batch, of a sample (n - 1)."),
    Metric("rewards/<function>/<part>/{mean,std}", "The same of a part that a function reports."),
    Metric("agent/<metric>/mean", "Mean per episode: `turns`, `tool_calls`, `tool_errors` (see agents.md)."),
    _trl("reward_std", "Standard deviation of the rewards in a group, of a sample (n - 1): mean over the groups."),
    _trl(
        "frac_reward_zero_std", "Groups in which all rewards are equal: without a signal for most algorithms.", "share"
    ),
    Metric("reward/greedy/mean", "Mean reward of the greedy responses, where an algorithm has them as baselines."),
    _distribution("reward/<kind>", "Rewards by stage (`raw`, `shaped`), and every penalty in use."),
    Metric("reward/clipped", "Rewards that `algorithm.reward.clip` cut.", "share"),
    Metric("reward/running_mean", "Running mean of `algorithm.reward.normalize`."),
    Metric("reward/running_std", "Running standard deviation of the same."),
    _distribution("critic/rewards", "Rewards that the estimator sees, shaped.", verl="mean, min, max"),
    _distribution("critic/advantages", "Advantages per token.", verl="mean, min, max"),
]

LENGTHS = [
    _verl("response_length/mean", "Mean length of the responses.", "tokens", "completions/mean_length"),
    _verl("response_length/max", "Longest response.", "tokens", "completions/max_length"),
    _verl("response_length/min", "Shortest response.", "tokens", "completions/min_length"),
    _verl("response_length/clip_ratio", "Responses that the token budget ended.", "share", "completions/clipped_ratio"),
    _trl("completions/mean_terminated_length", "Mean length of the responses that ended by themselves.", "tokens"),
    _trl("completions/max_terminated_length", "Longest of them.", "tokens"),
    _trl("completions/min_terminated_length", "Shortest of them.", "tokens"),
    _verl("prompt_length/mean", "Mean length of the prompts.", "tokens"),
    _verl("prompt_length/max", "Longest prompt.", "tokens"),
    _verl("prompt_length/min", "Shortest prompt.", "tokens"),
]

ACTOR = [
    Metric("actor/loss", "Loss that was differentiated, over the whole batch.", "", ("loss",), "actor/loss", "loss"),
    _verl("actor/pg_loss", "Policy loss per token, weights included, before aggregation."),
    _verl("actor/grad_norm", "Norm of the gradient before clipping.", trl="grad_norm"),
    _verl("actor/lr", "Learning rate.", trl="learning_rate"),
    _verl("actor/entropy", "Entropy of the policy at the trained tokens.", "nats", "entropy"),
    Metric("actor/entropy_coef", "Coefficient of the entropy bonus, where it adapts."),
    _verl(
        "actor/ppo_kl",
        "k1 estimate of KL(anchor || current): how far the policy has moved from the clip's anchor.",
        "nats",
    ),
    Metric("actor/k3_kl", "k3 estimate of the same: never negative.", "nats"),
    Metric("actor/ppo_kl_abs", "Mean absolute log-ratio (`kl_cov`).", "nats"),
    Metric("actor/log_ratio_squared", "Mean squared log-ratio (`dro`)."),
    Metric(
        "actor/ratio/{p01,p50,p99}", "Quantiles of the ratio current / anchor, within 1.6 %: it is counted in bins."
    ),
    _verl("actor/pg_clipfrac", "Tokens without gradient because of the clip.", "share"),
    _verl("actor/pg_clipfrac_lower", "Tokens that the bound for negative advantages (dual clip) holds.", "share"),
    _trl("clip_ratio/low_mean", "Tokens below the lower bound, with a negative advantage.", "share"),
    _trl("clip_ratio/high_mean", "Tokens above the upper bound, with a positive advantage.", "share"),
    _trl("clip_ratio/region_mean", "Both.", "share"),
    _trl("cispo_clip_ratio", "Tokens whose weight `cispo` clips from above, with a positive advantage.", "share"),
    Metric("actor/kl_cov_selected", "Tokens that `kl_cov` penalizes.", "share"),
    _verl("actor/kl_loss", "KL estimate against the reference policy, where it is in the loss.", "nats", "kl"),
    _verl("actor/kl_coef", "Its coefficient."),
    Metric(
        "actor/reference_kl",
        "KL estimate against the reference policy, before the batch is trained.",
        "nats",
        ("actor/reward_kl_penalty",),
        "actor/reward_kl_penalty",
    ),
    Metric(
        "distillation/reverse_kl",
        "k1 estimate of KL(policy || teachers) per token, before the batch is trained.",
        "nats",
    ),
    Metric(
        "distillation/<teacher>/reverse_kl", "The same of one of several teachers, at the tokens it judges.", "nats"
    ),
    Metric("distillation/<teacher>/share", "Mean weight of that teacher over all tokens.", "share"),
    Metric("actor/positive_lm_loss", "Negative log-likelihood of correct responses (VAPO).", "nats"),
    Metric("actor/is_masked{,_low,_high}", "Tokens that `probability_band` leaves out, in all and by side.", "share"),
    Metric("actor/masked_advantage_{positive,negative}", "The same by the sign of the advantage.", "share"),
    Metric(
        "actor/{masked,unmasked}_mismatch_kl", "k3 estimate of the drift of these tokens, and of the others.", "nats"
    ),
    Metric("vespo/phi", "Mean weight of `vespo`."),
    Metric("masked/<reason>", "Tokens that are not trained, by reason (`truncated`, `off_policy`, ...).", "share"),
    Metric(
        "ranks/differing",
        "Values of the batch stage (advantages, kept tokens, ...) that some rank got differently: rank 0's were "
        "trained. Reported where there are any.",
    ),
    Metric("skipped_updates", "Optimizer steps left out because their gradient was not finite."),
]

CRITIC = [
    Metric("prm/accuracy", "Responses whose outcome the implicit reward model (PRIME) gets right.", "share"),
    Metric("prm/reward", "Mean process reward per token."),
    Metric("<role>/loss", "Loss of a role other than the actor."),
    Metric(
        "<role>/load_balance_loss",
        "Loss of unequally used experts (`learner.router.load_balance_coeff`), without its weight: 1 where all get "
        "as many tokens. Over all tokens of the step, mean over layers.",
    ),
    Metric(
        "<role>/router_z_loss",
        "Loss of large logits of routers (`learner.router.z_loss_coeff`), without its weight; mean over "
        "tokens and layers.",
    ),
    Metric(
        "<role>/expert_load_max",
        "Tokens of the expert that gets most, over the mean of its layer; of the layer where it is largest. A prompt "
        "counts once for each of its responses. None is dropped.",
    ),
    Metric(
        "<role>/expert_load_entropy",
        "Entropy of the experts' shares of the tokens over that of equal shares, mean over layers: 1 where all get as "
        "many.",
    ),
    Metric(
        "<role>/router_replayed",
        "Tokens, over layers, that are computed with the experts that their generator has chosen "
        "(`learner.router.replay`).",
        "share",
    ),
    Metric(
        "<role>/router_drift",
        "Of these, tokens for which the learner's router would have chosen other experts.",
        "share",
    ),
    Metric("<role>/grad_norm", "Norm of its gradient before clipping.", verl="critic/grad_norm"),
    Metric("<role>/lr", "Its learning rate.", verl="critic/lr"),
    _verl("critic/vf_loss", "Value loss per token."),
    _verl("critic/vf_clipfrac", "Tokens whose value the clip holds.", "share"),
    Metric("critic/vf_outside", "Tokens whose value has left the clip's range.", "share"),
    _verl("critic/vpred_mean", "Mean value under the critic that is trained."),
    _distribution("critic/values", "Values before the batch.", verl="mean, min, max"),
    _distribution("critic/returns", "Targets of the critic.", verl="mean, min, max"),
    _verl("critic/vf_explained_var", "1 - Var(returns - values) / Var(returns)."),
]

OFF_POLICY = [
    Metric("staleness/mean", "Age of the trained tokens: mean.", "versions"),
    Metric("staleness/max", "Age of the oldest.", "versions"),
    Metric("staleness/histogram", "Trained tokens by age (only in `metrics.jsonl`).", "tokens"),
    Metric("rollout_corr/ratio/ess", "Effective sample size of the ratios current / behaviour.", "share"),
    Metric("rollout_corr/ratio/mean", "Mean of these ratios, without truncation; near 1 where nothing is wrong."),
    Metric("rollout_corr/ratio/{p01,p50,p99}", "Quantiles of the same."),
    Metric("rollout_corr/log_ratio_max", "Largest absolute log-ratio of a token.", "nats"),
    Metric("rollout_corr/truncated_fraction", "Tokens whose ratio lies outside [floor, cap].", "share"),
    Metric(
        "mismatch/tokens", "Tokens compared: of responses that the trained version sampled from end to end.", "tokens"
    ),
    Metric(
        "mismatch/log_prob_diff", "Mean absolute difference of the learner's and the generator's log-probs.", "nats"
    ),
    Metric("mismatch/k3_kl", "k3 estimate of KL(generator || learner) at these tokens: never negative.", "nats"),
    Metric("mismatch_warning", "In words: a bound of `learner.mismatch` is exceeded."),
    _verl("rollout_corr/kl", "k1 estimate of KL(behaviour || current).", "nats"),
    _verl("rollout_corr/k3_kl", "k3 estimate of the same: never negative.", "nats"),
    _verl("rollout_corr/chi2_token", "Chi-square divergence per token: variance of token weights."),
    _verl("rollout_corr/chi2_seq", "The same of whole responses."),
    _verl("rollout_corr/ppl_ratio", "Ratio of the responses' perplexities, trained to sampled."),
    _verl("rollout_corr/{training,rollout}_ppl", "Perplexity of the responses under trained and sampling policy."),
    _verl("rollout_corr/{training,rollout}_log_ppl", "Its logarithm.", "nats"),
    _verl("rollout_corr/log_ppl_{diff,abs_diff,diff_max,diff_min}", "Difference of the two.", "nats"),
    _verl("rollout_corr/rollout_is_mean", "Mean importance weight.", "", "sampling/importance_sampling_ratio/mean"),
    _verl("rollout_corr/rollout_is_eff_sample_size", "Effective sample size of the weights.", "share"),
    _verl(
        "rollout_corr/rollout_is_<statistic>",
        "Further statistics of the weights, over tokens and over responses (`seq_`).",
    ),
    _verl("rollout_corr/rollout_rs_masked_fraction", "Tokens that a rule rejects.", "share"),
    _verl("rollout_corr/rollout_rs_seq_masked_fraction", "Responses that lose tokens to a rule.", "share"),
    _verl("rollout_corr/rollout_rs_<statistic>", "Statistics of every rejection rule, and of its rejected tokens."),
]

PLACEMENT = [
    Metric("placement/to_training_s", "The last swap of shared devices to the learner.", "s"),
    Metric("placement/to_generating_s", "The last swap of them to the generators.", "s"),
    Metric(
        "placement/{freezing,releasing,onloading,offloading,waking,loading,verifying,resuming}_s",
        "Steps of these swaps (docs/placement.md).",
        "s",
    ),
    Metric("placement/swap_share", "Part of the time since the learner's second turn began that swaps took.", "share"),
    Metric("placement/turns", "Turns that this learner has had."),
    Metric("placement/taken_back", "Swaps that were taken back because a step failed."),
    Metric("placement/{generators,learner}_freed_bytes", "Memory that they gave back at the last swap.", "bytes"),
]

TIMING = [
    _verl("timing_s/step", "The whole step.", "s", "step_time"),
    _verl("timing_s/gen", "Waiting for groups: generation itself continues concurrently with the training.", "s"),
    Metric("timing_s/prepare", "Planning and packing.", "s"),
    Metric("timing_s/claim", "Waiting for the claim's answer, beyond what ran concurrently.", "s"),
    _verl("timing_s/update_actor", "Forward, backward and optimizer, of all roles.", "s"),
    _verl("timing_s/update_weights", "Storing the new weights, and waiting for the announcement before.", "s"),
    _verl(
        "timing_s/save_checkpoint",
        "Standing still for a checkpoint: copying the state, waiting for the one before.",
        "s",
    ),
    Metric("checkpoint/write_s", "From the step of the last checkpoint to its commit, while training continued.", "s"),
    Metric("checkpoint/failed", "Checkpoints that a disk has refused, of this learner.", ""),
    Metric("checkpoint/copies_failed", "Times that `checkpoint.copy_to` could not be brought up to date.", ""),
    Metric(
        "timing_s/infer/<role>",
        "Forward passes of a role before the batch's first update.",
        "s",
        verl="timing_s/old_log_prob, timing_s/ref, timing_s/values",
    ),
    Metric("timing_s/update/<role>", "Forward, backward and optimizer of a role.", "s", verl="timing_s/update_critic"),
    Metric("timing_s/<phase>", "Further phases of the training thread.", "s"),
    _verl("perf/time_per_step", "The same as `timing_s/step`.", "s"),
    _verl("perf/total_num_tokens", "Prompt and response tokens of the batch.", "tokens"),
    Metric("perf/throughput", "Those per second, over all ranks (verl: per GPU).", "tokens/s", verl="perf/throughput"),
    Metric(
        "perf/tflops/<role>",
        "Model FLOPs of a role's updates, per device and second, without recomputation.",
        "TFLOP/s",
    ),
    Metric(
        "perf/mfu/<role>",
        "The same as a share of the device's peak, where that is known.",
        "share",
        verl="perf/mfu/actor",
    ),
    Metric("perf/max_rss_gb", "Largest resident memory of any rank so far.", "GiB"),
    _verl("perf/max_memory_allocated_gb", "Largest memory of tensors on any rank's device in the step.", "GiB"),
    _verl("perf/max_memory_reserved_gb", "The same with what torch keeps for later.", "GiB"),
    Metric("tokens_per_second", "Trained response tokens per second.", "tokens/s"),
]

MESH = [
    Metric("step", "Batches trained (verl: `training/global_step`)."),
    Metric("time", "Unix time of the record.", "s"),
    Metric("wall_s", "Time since the first version of the run, time between learners left out.", "s"),
    Metric("version", "Policy version that the step made."),
    Metric("incarnation", "Learner of the run that made it."),
    Metric("groups", "Groups of the batch."),
    Metric("samples", "Scored responses of the batch."),
    Metric("tokens", "Trained response tokens of the batch.", "tokens"),
    Metric("total/{tokens,samples}", "Trained `tokens` and `samples` of the run so far."),
    Metric("unscored_members", "Responses without a reward: left out of baselines and of training."),
    Metric("unscored/<code>", "The same by code: `unscorable`, `reward_timeout`, `episode_failed`, ..."),
    Metric("unscored_cause", "The newest cause in words, where there are any."),
    Metric("attempts/max", "Most times that a group of the batch was granted."),
    Metric("dropped/<reason>", "Groups given back on the way to this batch, by reason."),
    Metric("delay/generating_s", "Mean time from admission to the last response of a group.", "s"),
    Metric("delay/queued_s", "Mean time that a complete group waited to be trained.", "s"),
    Metric("clock/waiting_for_inserts_s", "Cumulative: the learner waited, and no group was ready.", "s"),
    Metric("clock/waiting_for_samples_s", "Cumulative: generators decoded nothing, and the gate was shut.", "s"),
    Metric("clock/stalled_s", "Cumulative, of this learner: it waited, and nothing moved.", "s"),
    Metric("clock/stalls", "Number of such stalls."),
    Metric("callbacks/failed", "Calls of callbacks that have raised or hung, of this learner."),
    Metric("trackers/lost_records", "Records that trackers of services have not taken, of this learner."),
    Metric("push/count", "Weights taken into service by generators so far."),
    Metric("push/errors", "Failed transfers so far."),
    Metric("push/first_byte_ms_{p50,p99}", "From the announcement of a version to its first byte.", "ms"),
    Metric("push/last_byte_ms_{p50,p99}", "From the announcement to the last verified byte.", "ms"),
    Metric("push/total_ms_{p50,p99}", "From the announcement of a version to its service.", "ms"),
    Metric("push/ack_ms_{p50,p99}", "From the announcement to the report of it, by the learner's clock.", "ms"),
    Metric("push/pause_ms_{p50,p99}", "Pause in decoding while weights change.", "ms"),
    Metric("peak_rss_bytes", "Largest resident memory of the learner so far.", "bytes"),
]

EVALUATION = [
    Metric("eval/reward", "Mean held-out reward over scored responses.", "", ("eval_reward",), "", "eval_reward"),
    Metric("eval/reward/<source>", "The same per data source (verl: `val-core/<source>/reward/mean@n`)."),
    Metric("eval/mean@<n>", "Mean over prompts of the mean reward of n responses, with eval.n above 1."),
    Metric("eval/maj@<n>", "Reward of the answer given most often, mean over prompts."),
    Metric("eval/best@<n>", "Highest reward of n responses, mean over prompts."),
    Metric("eval/pass@<k>", "Chance that one of k responses is right (reward of at least eval.right_at)."),
    Metric("eval/version", "Version that was evaluated."),
    Metric("eval/scored", "Scored responses."),
    Metric("eval/failed", "Others: never counted as a zero."),
    Metric("eval/response_length/mean", "Mean length of held-out responses.", "tokens"),
    Metric("eval/seconds", "From the first prompt to the last response.", "s"),
    Metric(
        "eval/measured_by", "Name of the way in which it was measured: values under different names cannot be compared."
    ),
    Metric("eval/skipped", "Rounds left out so far because the previous one was still running: see eval.every_steps."),
]

TRAINERS = [
    Metric("steps", "Optimizer steps of the whole training."),
    _trl("epoch", "Passes over the data so far."),
    Metric("skipped_rows", "Rows of the step that were left out: too long, or without a token to train."),
    Metric("eval/loss", "Loss on held-out rows.", "", ("eval_loss",), "val/loss", "eval_loss"),
    Metric("eval/loss/<source>", "The same of one source, where `data.eval` has several."),
    _trl("rewards/{chosen,rejected}", "Mean reward of these responses: scores, or beta x log-ratio to the reference."),
    _trl("rewards/margins", "Mean difference of the two."),
    _trl("rewards/accuracies", "Pairs in which the chosen response has the larger one.", "share"),
    _trl("logps/{chosen,rejected}", "Mean log-prob of these responses.", "nats"),
    Metric("actor/kto_divergence", "KTO's estimate of KL(policy || reference), never negative.", "nats"),
    Metric("eval/kto_divergence", "The same on held-out rows.", "nats"),
    _trl("eval/rewards/{chosen,rejected,margins,accuracies}", "As without `eval/`, on held-out rows."),
    _trl("eval/logps/{chosen,rejected}", "As without `eval/`, on held-out rows.", "nats"),
    Metric("eval/entropy", "Entropy of the policy at their trained tokens.", "nats", trl="eval_entropy"),
    Metric("eval/{entropy,kto_divergence}/<source>", "The same of one source.", "nats"),
    Metric("eval/{rewards,logps}/{chosen,rejected,margins,accuracies}/<source>", "The same of one source."),
]

CATALOGUE: dict[str, list[Metric]] = {
    "Rewards and advantages": REWARDS,
    "Lengths": LENGTHS,
    "Policy": ACTOR,
    "Critic and other roles": CRITIC,
    "Staleness and its correction": OFF_POLICY,
    "Time and throughput": TIMING,
    "Shared devices": PLACEMENT,
    "Mesh": MESH,
    "Evaluation": EVALUATION,
    "Trainers": TRAINERS,
}
"""Section of the documentation -> its metrics. Where two describe a name, the first does."""


def describe(name: str) -> Metric | None:
    """The description of a metric; None for an unknown one and for an alias."""
    found = (metric for section in CATALOGUE.values() for metric in section if metric.pattern.fullmatch(name))
    return next(found, None)


def catalogue_markdown() -> str:
    """The catalogue as Markdown: a table per section."""
    lines: list[str] = []
    for title, metrics in CATALOGUE.items():
        lines += [f"### {title}", "", "| metric | meaning | unit | verl | TRL |", "|---|---|---|---|---|"]
        for metric in metrics:
            peers = (_peer(metric, metric.verl), _peer(metric, metric.trl))
            meaning = metric.meaning.replace("|", "\\|")
            lines.append(f"| `{metric.name}` | {meaning} | {metric.unit} | {peers[0]} | {peers[1]} |")
        lines.append("")
    return "\n".join(lines)


def _peer(metric: Metric, name: str) -> str:
    if not name:
        return ""
    return "same" if name == metric.name else f"`{name}`"
