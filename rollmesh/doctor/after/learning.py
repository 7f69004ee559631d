"""Signs of bad learning in the metrics of the steps.

Bounds are rules of thumb; a finding says the numbers, so that a reader can judge them. Names of metrics and their
meaning: `learner.metrics.catalogue`.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean, median

from rollmesh.doctor.after.run_records import RunRecords
from rollmesh.doctor.findings import Finding, note, ok, problem, warning
from rollmesh.report.equal_rewards import HIGHEST, LOWEST, REMEDY, equal_rewards
from rollmesh.report.metrics import REWARD

CHECK = "learning"
# Steps below which nothing is said of trends.
_FEW_STEPS = 5
_TREND_STEPS = 20
_LOW_ESS = 0.5
# Nats per token.
_KL_FAR, _KL_TIMES = 0.5, 5.0
_ENTROPY_LOW, _ENTROPY_SHARE = 0.1, 0.2
_SPIKE, _OFTEN = 10.0, 0.02
_SATURATED = 0.98


def judge_learning(run: RunRecords) -> Iterator[Finding]:
    """Findings about policy, rewards and gradients."""
    if len(run.steps) < _FEW_STEPS:
        yield note(CHECK, f"{len(run.steps)} step(s) were trained: too few to judge")
        return
    found = [*_mismatch(run), *_off_policy(run), *_kl(run), *_entropy(run), *_rewards(run), *_gradients(run)]
    yield from found
    if not found:
        yield ok(CHECK, f"nothing is unusual in the metrics of {len(run.steps)} steps")


def _mismatch(run: RunRecords) -> Iterator[Finding]:
    bounds = run.config.learner.mismatch
    for metric, bound, key in (
        ("mismatch/log_prob_diff", bounds.warn, "learner.mismatch.warn"),
        ("mismatch/k3_kl", bounds.warn_kl, "learner.mismatch.warn_kl"),
    ):
        value = run.recent(metric, median)
        if value is not None and bound is not None and value > bound:
            engine, dtype = run.config.rollout.engine, run.config.model.dtype
            yield problem(
                CHECK,
                f"generators and learner disagree about the same version: {metric} is {value:.3g} nats per token, over "
                f"{key} ({bound:g})",
                f"`rollmesh weights verify` compares the weights. If they agree, it is how {engine} computes: "
                f"model.dtype (now {dtype}) for both sides, no quantization, no other attention kernel; with experts "
                "learner.router.replay",
                metric=metric,
                value=value,
            )
            return


def _off_policy(run: RunRecords) -> Iterator[Finding]:
    ess, staleness = run.recent("rollout_corr/ratio/ess", median), run.config.buffer.max_staleness
    if ess is not None and ess < _LOW_ESS:
        age = run.recent("staleness/mean", fmean) or 0.0
        yield warning(
            CHECK,
            f"the effective sample size of the ratios is {ess:.0%}: few tokens carry the gradient (mean age {age:.1f} "
            "versions)",
            f"buffer.max_staleness={max(0, staleness // 2)} (now {staleness}), or a lower learner.optimizer.lr (now "
            f"{run.config.learner.optimizer.lr:g}); algorithm.correction.cap bounds single weights",
            ess=ess,
        )


def _kl(run: RunRecords) -> Iterator[Finding]:
    for metric in ("actor/reference_kl", "actor/kl_loss", "rollout_corr/k3_kl"):
        early, late = run.early(metric, median), run.recent(metric, median, 0.1)
        if early is None or late is None or len(run.values(metric)) < _TREND_STEPS:
            continue
        if late > _KL_FAR and late > _KL_TIMES * max(early, 1e-6):
            lr = run.config.learner.optimizer.lr
            which = "the reference" if metric.startswith("actor/") else "the policy that sampled"
            yield warning(
                CHECK,
                f"the policy runs away from {which}: {metric} rose from {early:.3g} to {late:.3g} nats",
                f"learner.optimizer.lr={lr / 2:g} (now {lr:g}), and a penalty: algorithm.kl.where=loss with "
                "algorithm.kl.coefficient=0.01, or ten times the present one",
                metric=metric,
                early=early,
                late=late,
            )
            return


def _entropy(run: RunRecords) -> Iterator[Finding]:
    early, late = run.early("actor/entropy", fmean), run.recent("actor/entropy", fmean, 0.1)
    if early is None or late is None or len(run.values("actor/entropy")) < _TREND_STEPS:
        return
    if late < _ENTROPY_LOW and late < _ENTROPY_SHARE * early:
        yield warning(
            CHECK,
            f"the policy's entropy fell from {early:.3g} to {late:.3g} nats: it hardly explores any more",
            "algorithm.loss.clip_high=0.28 (DAPO), algorithm.entropy.target near the early value, or a lower "
            f"learner.optimizer.lr (now {run.config.learner.optimizer.lr:g}); if the held-out reward is high, stop",
            early=early,
            late=late,
        )


def _rewards(run: RunRecords) -> Iterator[Finding]:
    lows, highs, means = run.values(LOWEST), run.values(HIGHEST), run.values(REWARD)
    if not lows or not highs:
        return
    low, high = min(lows), max(highs)
    if same := equal_rewards(lows, highs, f"all {len(run.steps)} steps"):
        yield problem(CHECK, same, REMEDY, reward=low)
        return
    late = fmean(means[-max(1, len(means) // 10) :])
    if late >= low + _SATURATED * (high - low):
        yield note(
            CHECK,
            f"the reward is {late:.3g}, of {high:g} at most: the training data are solved",
            "harder data, or stop: eval.stop_at ends a run at a held-out reward",
            reward=late,
        )


def _gradients(run: RunRecords) -> Iterator[Finding]:
    norms, lr = run.values("actor/grad_norm"), run.config.learner.optimizer.lr
    skipped = sum(run.values("skipped_updates"))
    if skipped:
        yield problem(
            CHECK,
            f"{skipped:.0f} optimizer step(s) were left out: their gradient was not finite",
            f"learner.optimizer.lr={lr / 2:g} (now {lr:g}); in half precision learner.param_dtype=float32 shows "
            "whether it is the range; a reward or a token weight that is very large can be the cause too",
            skipped=skipped,
        )
    if len(norms) < _TREND_STEPS or not (usual := median(norms)):
        return
    spikes = sum(norm > _SPIKE * usual for norm in norms)
    if spikes > _OFTEN * len(norms):
        bound = run.config.learner.optimizer.max_grad_norm
        yield warning(
            CHECK,
            f"{spikes} of {len(norms)} steps have a gradient over {_SPIKE:g} times the usual norm ({usual:.3g})",
            f"learner.optimizer.max_grad_norm={usual:.2g} (now {bound:g}) cuts them; a larger learner.batch.groups "
            f"(now {run.config.learner.batch.groups}) makes them rarer",
            spikes=spikes,
            usual=usual,
        )
