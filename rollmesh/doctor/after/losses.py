"""Work that was done in vain: groups without a signal, evicted or failed, responses without a reward or cut off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

from rollmesh.doctor.after.run_records import RunRecords
from rollmesh.doctor.findings import Finding, ok, problem, warning
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.runtime.threads import reward_workers
from rollmesh.report.branches import Branches
from rollmesh.report.failures import failures_text
from rollmesh.report.unscored import UnscoredMembers

CHECK = "losses"
_NO_VARIANCE, _CUT_OFF = 0.5, 0.2
_EVICTED, _FAILED, _UNSCORED = 0.1, 0.05, 0.05
# Codes of responses that ended because rewards took too long.
_SLOW_REWARDS = ("reward_timeout", "reward_not_begun", "timeout")


def judge_losses(run: RunRecords) -> Iterator[Finding]:
    """Findings about groups and responses that taught nothing."""
    found = [
        *_no_variance(run),
        *_cut_off(run),
        *_branches(run),
        *judge_unscored(run.unscored, run.config),
        *(judge_fates(run.summary.groups_by_fate, run.summary.ledger, run.config) if run.summary is not None else ()),
    ]
    yield from found
    if not found and run.steps:
        yield ok(CHECK, "few groups and responses were in vain")


def _no_variance(run: RunRecords) -> Iterator[Finding]:
    share = run.recent("frac_reward_zero_std", fmean)
    if share is None or share <= _NO_VARIANCE:
        return
    n, reward = run.config.rollout.n, run.recent("critic/score/mean", fmean) or 0.0
    highest, lowest = run.recent("critic/score/max", max) or 0.0, run.recent("critic/score/min", min) or 0.0
    kind = "too easy" if reward - lowest > (highest - lowest) / 2 else "too hard"
    yield warning(
        CHECK,
        f"{share:.0%} of the trained groups have the same reward for all members, and teach nothing (mean reward "
        f"{reward:.3g}: most prompts are {kind})",
        f"rollout.n={2 * n} (now {n}), or algorithm.filter.zero_variance=true, which trains other groups instead; or "
        "data of another difficulty",
        share=share,
    )


def _cut_off(run: RunRecords) -> Iterator[Finding]:
    share, most = run.recent("response_length/clip_ratio", fmean), run.config.rollout.max_response_tokens
    if share is not None and share > _CUT_OFF:
        yield warning(
            CHECK,
            f"{share:.0%} of the responses were cut off at {most} tokens",
            f"rollout.max_response_tokens={2 * most}; or algorithm.filter.truncated=mask, which does not train them. "
            "Where none ends by itself, see the chat template and rollout.stop",
            share=share,
        )


def _branches(run: RunRecords) -> Iterator[Finding]:
    branches = Branches.of(run.steps)
    if branches.warning:
        yield warning(
            CHECK,
            branches.warning,
            "send answers back as they came, and only add messages: docs/endpoint.md#branches has the forms that are "
            "known again, and a remedy for each reason. `agent/turns_dropped_.../mean` counts turns by reason",
            share=branches.share,
        )


def judge_unscored(unscored: UnscoredMembers, config: Config) -> Iterator[Finding]:
    """Judges the responses of trained groups without a reward."""
    count = unscored.codes.total()
    if not unscored.members or count <= _UNSCORED * unscored.members:
        return
    share = count / unscored.members
    if any(unscored.codes[code] for code in _SLOW_REWARDS):
        reward, wait_s = config.reward, config.rollout.reward_wait_s
        remedy = (
            f"reward.workers={2 * max(reward_workers(reward.workers))}; where single calls are slow, twice their time: "
            f"reward.scorer_timeout_s={2 * reward.scorer_timeout_s:g}, reward.timeout_s={2 * reward.timeout_s:g} and "
            f"rollout.reward_wait_s={2 * wait_s:g}"
        )
    else:
        remedy = "repair the reward function: `rollmesh ledger --failed` and the generators' logs have each cause"
    yield problem(CHECK, unscored.text(), remedy, share=share)


def judge_fates(
    groups: Mapping[str, int], ledger: Mapping[str, Mapping[str, object]], config: Config
) -> Iterator[Finding]:
    """Judges the ends of groups.

    Args:
        groups: numbers by fate, those that live among them.
        ledger: table -> counters, reasons, causes and discrepancies, as `Summary` has it.
        config: of the run.
    """
    total = sum(groups.values())
    if not total:
        return
    if groups.get("evicted_stale", 0) > _EVICTED * total:
        share, staleness = groups["evicted_stale"] / total, config.buffer.max_staleness
        order = "" if config.buffer.order == "in_order" else "buffer.order=in_order, which waits for them; or "
        yield warning(
            CHECK,
            f"{groups['evicted_stale']} of {total} groups ({share:.0%}) were evicted, older than {staleness} versions",
            f"{order}buffer.max_staleness={max(2 * staleness, 1)} (now {staleness}); long responses are evicted first",
            share=share,
        )
    failed = groups.get("failed", 0)
    if failed > _FAILED * total:
        table = ledger.get("train", {})
        reasons, causes = table.get("reasons"), table.get("causes")
        text = failures_text(
            "train", reasons if isinstance(reasons, Mapping) else {}, causes if isinstance(causes, Mapping) else ()
        )
        yield problem(
            CHECK,
            text or f"{failed} of {total} groups failed",
            "`rollmesh ledger --failed` lists the causes; `--redrive all` queues their prompts again",
            share=failed / total,
        )
