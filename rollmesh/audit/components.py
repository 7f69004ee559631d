"""Components of a composed reward, and a second scorer on the same samples: where they disagree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import fmean, pstdev

from rollmesh.audit.evidence import Kept, RunEvidence
from rollmesh.audit.statistics import rank_correlation
from rollmesh.doctor.findings import Finding, not_checked, note, ok, warning
from rollmesh.reward_service.trying.tried import SCORED, Tried

COMPONENTS, AGAINST = "components", "against"
_LEAST = 30
# Change of a mean in standard deviations, and correlation from which on two scorers contradict each other.
_CHANGE, _CONTRADICTION = 0.5, -0.3
_AGREEMENT = 0.3
_SHOWN = 3


def look_at_components(run: RunEvidence) -> Iterator[Finding]:
    """Components that contradict each other, or of which one rises at the other's cost."""
    names = sorted({name for sample in run.samples for name in sample.components} - {"total"})
    if len(names) < 2:
        yield ok(COMPONENTS, f"the reward has {len(names) or 'no'} component(s): nothing to compare")
        return
    found = [finding for one, other in combinations(names, 2) for finding in _pair(run, one, other)]
    constant = [name for name in names if len({s.components[name] for s in run.samples if name in s.components}) == 1]
    if constant:
        found.append(
            note(COMPONENTS, f"always the same: {', '.join(constant)}", "it teaches nothing; is its input there?")
        )
    yield from found or [ok(COMPONENTS, f"{', '.join(names)} do not contradict each other")]


def _pair(run: RunEvidence, one: str, other: str) -> Iterator[Finding]:
    both = [s for s in run.samples if one in s.components and other in s.components]
    early, late = ([s for s in part if one in s.components and other in s.components] for part in (run.early, run.late))
    if min(len(early), len(late)) < _LEAST:
        return
    changes = {name: _change(both, early, late, name) for name in (one, other)}
    rising, falling = max(changes, key=lambda n: changes[n]), min(changes, key=lambda n: changes[n])
    example = max(late, key=lambda s: s.components[rising] - s.components[falling])
    if changes[rising] >= _CHANGE and changes[falling] <= -_CHANGE:
        yield warning(
            COMPONENTS,
            f"{rising} rises ({_means(early, late, rising)}) while {falling} falls ({_means(early, late, falling)}); "
            f"for example {example.where}",
            f"the model trades one for the other: a smaller weight for {rising}, or a gate, so that it counts only "
            f"where {falling} is good",
            **example.place,
        )
        return
    correlation = rank_correlation([s.components[one] for s in late], [s.components[other] for s in late])
    if correlation is not None and correlation <= _CONTRADICTION:
        yield warning(
            COMPONENTS,
            f"{one} and {other} contradict each other: rank correlation {correlation:.2f} in {len(late)} samples of "
            f"the last third; for example {example.where}",
            "read such samples: one of the two is probably wrong, or can be had without the other",
            correlation=correlation,
            **example.place,
        )


def _change(both: Sequence[Kept], early: Sequence[Kept], late: Sequence[Kept], name: str) -> float:
    spread = pstdev(s.components[name] for s in both)
    return (
        (fmean(s.components[name] for s in late) - fmean(s.components[name] for s in early)) / spread if spread else 0.0
    )


def _means(early: Sequence[Kept], late: Sequence[Kept], name: str) -> str:
    return f"{fmean(s.components[name] for s in early):.3g} to {fmean(s.components[name] for s in late):.3g}"


def compare_with(samples: Sequence[Kept], tried: Sequence[Tried], scorer: str) -> Iterator[Finding]:
    """Findings about a second scorer on the same samples.

    Args:
        samples: of the run.
        tried: the second scorer's outcome for each.
        scorer: its name.
    """
    scored = [(s, t) for s, t in zip(samples, tried, strict=True) if t.outcome == SCORED]
    if len(scored) < len(samples):
        failed = next(t for t in tried if t.outcome != SCORED)
        yield note(
            AGAINST,
            f"{scorer} scored {len(scored)} of {len(samples)} samples; {failed.name}/{failed.member}: "
            f"{failed.verdict}, {failed.text}",
        )
    correlation = rank_correlation([s.reward for s, _ in scored], [t.total for _, t in scored])
    if correlation is None or len(scored) < _LEAST:
        yield not_checked(AGAINST, f"{len(scored)} samples with both rewards: too few that differ to compare")
        return
    ranked = sorted(scored, key=lambda pair: pair[0].reward - pair[1].total, reverse=True)
    differing = [(s, t) for s, t in ranked if s.reward > t.total]
    text = f"rank correlation of the reward with {scorer}: {correlation:.2f} over {len(scored)} samples"
    thirds = [
        fmean(s.reward - t.total for s, t in part)
        for part in (scored[: len(scored) // 3], scored[-(len(scored) // 3) :])
        if part
    ]
    text += f"; the reward exceeds it by {thirds[0]:.3g} in the first third and {thirds[-1]:.3g} in the last"
    spread = max(pstdev(s.reward for s, _ in scored), 1e-9)
    if correlation >= _AGREEMENT and thirds[-1] - thirds[0] < _CHANGE * spread:
        yield ok(AGAINST, text, correlation=correlation)
        return
    shown = "; ".join(f"{s.where}: {s.reward:g}, {scorer} {t.total:g}" for s, t in differing[:_SHOWN])
    yield warning(
        AGAINST,
        f"{text}. Largest differences: {shown or '-'}",
        "read these samples: what does the reward see in them that the other scorer does not?",
        correlation=correlation,
        **(differing[0][0].place if differing else {}),
    )
