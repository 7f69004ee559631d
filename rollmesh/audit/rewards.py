"""Rewards as such: their range over time, groups without a difference, responses without a reward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from rollmesh.audit.evidence import Kept, RunEvidence
from rollmesh.doctor.findings import Finding, not_checked, note, ok, warning
from rollmesh.mesh.config.scorers.judge import JudgeSection
from rollmesh.report.metrics import REWARD, metric_value
from rollmesh.reward_service.judge.spent import Spent

DISTRIBUTION, SATURATION, UNSCORED, HELD_OUT, JUDGE = "distribution", "saturation", "unscored", "held-out", "judge"
_SATURATED = 0.8
_UNSCORED = 0.05
_NEARLY_SPENT = 0.9
# Evaluations after the best one, and the least fall as a share of the range of held-out rewards.
_EVALUATIONS = 2
_FALL = 0.2


def look_at_distribution(run: RunEvidence) -> Iterator[Finding]:
    """The range of rewards at the beginning and at the end."""
    yield ok(
        DISTRIBUTION,
        f"{len(run.samples)} kept rewards from {run.bottom:g} to {run.top:g}: {_spread(run.early)} in the first third "
        f"of the steps, {_spread(run.late)} in the last",
        least=run.bottom,
        most=run.top,
    )


def look_at_saturation(run: RunEvidence) -> Iterator[Finding]:
    """Groups whose members all have one reward, and the share of it."""
    groups = {(s.step, s.group): s.group_rewards for s in run.late if len(s.group_rewards) > 1}
    if not groups:
        yield not_checked(SATURATION, "no group with several rewards was kept")
        return
    equal = [place for place, rewards in groups.items() if min(rewards) == max(rewards)]
    at_top = sum(groups[place][0] >= run.top for place in equal) / len(groups)
    at_bottom = sum(groups[place][0] <= run.bottom for place in equal) / len(groups)
    share = len(equal) / len(groups)
    text = (
        f"{share:.0%} of {len(groups)} kept groups in the last third of the steps have one reward for all members "
        f"({at_top:.0%} the highest, {at_bottom:.0%} the lowest)"
    )
    numbers = {"share": share, "at_top": at_top, "at_bottom": at_bottom, "groups": len(groups)}
    if share >= _SATURATED:
        step, group = equal[-1]
        yield warning(
            SATURATION,
            f"{text}, as group {group} of step {step}: such groups teach nothing",
            "harder prompts where the highest is reached, easier ones where the lowest is; a reward with more than two "
            "values; algorithm.filter.zero_variance=true trains other groups instead",
            step=step,
            group=group,
            **numbers,
        )
    else:
        yield ok(SATURATION, text, **numbers)


def look_at_unscored(run: RunEvidence) -> Iterator[Finding]:
    """Responses without a reward, by reason."""
    text, members = run.unscored.text(), run.unscored.members
    if not text:
        yield ok(UNSCORED, f"all {members} responses of trained groups have a reward")
        return
    share = run.unscored.codes.total() / max(1, members)
    numbers = {"share": share, **{f"code/{code}": count for code, count in run.unscored.codes.items()}}
    if share >= _UNSCORED:
        yield warning(
            UNSCORED,
            f"{text}. A model can learn what breaks its scorer: baselines leave them out, so they cost nothing",
            "`rollmesh reward try RUN` repeats them; mend the scorer, or give such responses a reward of their own",
            **numbers,
        )
    else:
        yield note(UNSCORED, text, "", **numbers)


def look_at_judge(spent: Mapping[str, Spent], judge: JudgeSection) -> Iterator[Finding]:
    """The use of a language model as judge.

    Args:
        spent: by process; empty where the run has no judge.
        judge: of the run's configuration.
    """
    if not spent:
        return
    tokens, cost = sum(one.tokens for one in spent.values()), sum(one.cost for one in spent.values())
    share = max(tokens / (judge.budget_tokens or math.inf), cost / (judge.budget_cost or math.inf))
    text = f"{len(spent)} process(es) have used {tokens:.0f} tokens, which cost {cost:.4g}"
    numbers = {"tokens": tokens, "cost": cost}
    if share >= _NEARLY_SPENT:
        yield warning(
            JUDGE,
            f"{text}: {share:.0%} of the budget. Beyond it responses have no reward (`judge_budget`)",
            "raise reward.judge.budget_tokens or reward.judge.budget_cost",
            **numbers,
        )
    else:
        yield ok(JUDGE, text, **numbers)


def look_at_held_out(run: RunEvidence) -> Iterator[Finding]:
    """Training reward that rises while the held-out one falls."""
    rounds = [
        (int(record["step"]), value)
        for record in run.evaluations
        if (value := metric_value(record, "eval/reward")) is not None
    ]
    if len(rounds) <= _EVALUATIONS:
        yield not_checked(HELD_OUT, f"{len(rounds)} held-out round(s): too few to compare with")
        return
    best_step, best = max(rounds, key=lambda found: found[1])
    after = [value for step, value in rounds if step > best_step]
    spread = best - min(value for _, value in rounds)
    last = fmean(after[-_EVALUATIONS:]) if len(after) >= _EVALUATIONS else best
    trained = [(int(record["step"]), metric_value(record, REWARD) or 0.0) for record in run.steps]
    before, then = _around(trained, best_step)
    if best - last >= max(_FALL * spread, 1e-6) and max(after[-_EVALUATIONS:]) < best and then > before:
        risen = _risen_components(run, best_step)
        yield warning(
            HELD_OUT,
            f"the held-out reward fell from {best:.4g} (step {best_step}) to {last:.4g}, while the training reward "
            f"rose from {before:.4g} to {then:.4g}{risen}",
            f"compare responses from before and after step {best_step} (`rollmesh samples`); the checkpoint of that "
            "step is the better model; more data, or a stronger algorithm.kl",
            step=best_step,
            best=best,
            last=last,
        )
    else:
        yield ok(
            HELD_OUT,
            f"{len(rounds)} held-out rounds, the best {best:.4g} at step {best_step}, the last {rounds[-1][1]:.4g}",
        )


def _around(trained: Sequence[tuple[int, float]], step: int) -> tuple[float, float]:
    """Mean training reward of a tenth of the run up to a step, and at the end."""
    width = max(1, len(trained) // 10)
    before = [value for at, value in trained if at <= step][-width:]
    last = [value for at, value in trained if at > step][-width:]
    return (fmean(before) if before else 0.0), (fmean(last) if last else float("-inf"))


def _risen_components(run: RunEvidence, step: int) -> str:
    rises = {}
    for name in {name for sample in run.samples for name in sample.components}:
        before = [s.components[name] for s in run.samples if name in s.components and s.step <= step]
        after = [s.components[name] for s in run.samples if name in s.components and s.step > step]
        if before and after and fmean(after) > fmean(before):
            rises[name] = (fmean(before), fmean(after))
    return "".join(f"; component {name} from {low:.3g} to {high:.3g}" for name, (low, high) in sorted(rises.items()))


def _spread(samples: Sequence[Kept]) -> str:
    rewards = sorted(sample.reward for sample in samples)
    if not rewards:
        return "none"
    return f"mean {fmean(rewards):.3g}, median {rewards[len(rewards) // 2]:.3g}"
