"""Sudden changes over the steps, and rewards that follow the length of responses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from statistics import fmean

from rollmesh.audit.evidence import Kept, RunEvidence
from rollmesh.audit.statistics import Jump, concordance, largest_jump, rank_correlation
from rollmesh.doctor.findings import Finding, not_checked, note, ok, warning
from rollmesh.report.metrics import REWARD, metric_value

JUMPS, LENGTH = "jumps", "length"
_SERIES = {REWARD: "mean reward", "response_length/mean": "mean length", "actor/entropy": "entropy"}
_WINDOW, _NOISES, _SHARE = 10, 8.0, 0.3
# Steps between two jumps that belong together.
_TOGETHER = 5
# Pairs of one group, or steps, from which on a bias is judged; and how strong it is.
_PAIRS, _STEPS, _STEP_SAMPLES = 60, 20, 4
_AGREEING, _CORRELATION = 0.8, 0.6


def look_at_jumps(run: RunEvidence) -> Iterator[Finding]:
    """Steps at which the level of reward, length or entropy changes at once."""
    found: dict[str, tuple[int, Jump]] = {}
    looked = []
    for metric, name in _SERIES.items():
        series = [(int(step["step"]), value) for step in run.steps if (value := metric_value(step, metric)) is not None]
        if len(series) < 3 * _WINDOW:
            continue
        looked.append(name)
        jump = largest_jump([value for _, value in series], window=_WINDOW, noises=_NOISES, share=_SHARE)
        if jump is not None:
            found[name] = (series[jump.index][0], jump)
    if not looked:
        yield not_checked(JUMPS, f"{len(run.steps)} steps are too few")
        return
    if not found:
        yield ok(JUMPS, f"no sudden change of {', '.join(looked)} in {len(run.steps)} steps")
        return
    texts = [
        f"{name} from {jump.before:.3g} to {jump.after:.3g} at step {step}" for name, (step, jump) in found.items()
    ]
    text = f"changed at once: {'; '.join(texts)}"
    rewarded = found.get("mean reward")
    others = [step for name, (step, _) in found.items() if name != "mean reward"]
    if rewarded is None or rewarded[1].after < rewarded[1].before:
        yield note(JUMPS, text, "look at the samples around that step", step=min(step for step, _ in found.values()))
        return
    step = rewarded[0]
    example = next((s for s in run.samples if s.step >= step and run.is_high(s)), None)
    shown = f"; for example {example.where}" if example is not None else ""
    if any(abs(step - other) <= _TOGETHER for other in others):
        yield warning(
            JUMPS,
            f"{text}{shown}. A model that finds a way around its reward changes like this",
            f"read rewarded responses of steps {step} to {step + _WINDOW} next to earlier ones (`rollmesh samples`)",
            **(example.place if example is not None else {"step": step}),
        )
    else:
        yield note(JUMPS, text + shown, "read rewarded responses from before and after", step=step)


def look_at_length(run: RunEvidence) -> Iterator[Finding]:
    """Rewards that follow the length of the response: within groups, or else within steps."""
    groups: dict[tuple[int, str], list[Kept]] = defaultdict(list)
    steps: dict[int, list[Kept]] = defaultdict(list)
    for sample in run.samples:
        groups[sample.step, sample.group].append(sample)
        steps[sample.step].append(sample)
    agreeing, pairs = concordance(
        (one.length - other.length, one.reward - other.reward)
        for members in groups.values()
        for one, other in combinations(members, 2)
    )
    correlations = [
        found
        for samples in steps.values()
        if len(samples) >= _STEP_SAMPLES
        and (found := rank_correlation([s.length for s in samples], [s.reward for s in samples])) is not None
    ]
    if pairs >= _PAIRS:
        share = agreeing / pairs
        is_biased, sign = max(share, 1 - share) >= _AGREEING, share > 0.5
        text = f"of {pairs} pairs of responses to one prompt, the longer one has the higher reward in {share:.0%}"
        numbers = {"share": share, "pairs": pairs}
    elif len(correlations) >= _STEPS:
        mean = fmean(correlations)
        is_biased, sign = abs(mean) >= _CORRELATION, mean > 0
        text = f"rank correlation of reward and length {mean:.2f} within {len(correlations)} steps"
        numbers = {"correlation": mean, "steps": len(correlations)}
    else:
        yield not_checked(LENGTH, f"too few kept responses that differ: {pairs} pairs, {len(correlations)} steps")
        return
    trend = _trend(run)
    if not is_biased:
        yield ok(LENGTH, text + trend, **numbers)
        return
    example = max(run.late or run.samples, key=lambda s: (s.reward, s.length if sign else -s.length))
    yield warning(
        LENGTH,
        f"{text}{trend}; for example {example.where}: {example.length} tokens, reward {example.reward:g}",
        "compare a long and a short response of one group. A penalty of length in the algorithm or in the reward, "
        "or normalization of it; for a judge, a template that says that length does not count",
        **numbers,
        **example.place,
    )


def _trend(run: RunEvidence) -> str:
    if not run.early or not run.late:
        return ""
    early, late = fmean(s.length for s in run.early), fmean(s.length for s in run.late)
    return f" (mean length of kept ones {early:.0f} at first, {late:.0f} at last)"
