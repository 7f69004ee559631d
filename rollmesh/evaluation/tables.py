"""Evaluations and comparisons as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollmesh.evaluation.summary import EvaluationSummary
from rollmesh.learner.evaluation.intervals import LEVEL, Estimate


def summary_lines(summary: EvaluationSummary) -> Iterator[str]:
    """An evaluation: a row for all prompts and one for each source, a column for each metric with its interval."""
    prompts = summary.prompts
    yield f"{summary.name}: {prompts['answered']} of {prompts['asked']} prompts, {summary.scored} responses scored"
    yield ""
    names = list(summary.metrics)
    rows = [("all", summary.metrics), *summary.by_source.items()] if len(summary.by_source) > 1 else []
    rows = rows or [(next(iter(summary.by_source), "all"), summary.metrics)]
    counts = [str(max((estimate.prompts for estimate in found.values()), default=0)) for _, found in rows]
    table = [
        [source, count, *(_with_interval(found.get(name)) for name in names)]
        for (source, found), count in zip(rows, counts, strict=True)
    ]
    yield from grid_lines([["data_source", "prompts", *names], *table])
    yield ""
    yield f"in brackets: {LEVEL:.0%} confidence intervals over prompts"
    if summary.response_tokens is not None:
        yield (
            f"responses: {summary.response_tokens:.1f} tokens on average, "
            f"{summary.truncated or 0.0:.1%} ended by the token budget"
        )
    if summary.unscored:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in summary.reasons.items())
        yield f"without a score, and in no metric: {summary.unscored} responses: {reasons}"
    if prompts["left_out"]:
        yield f"left out, empty or too long: {prompts['left_out']} prompts (rollout.max_prompt_tokens)"
    if not summary.complete:
        yield "some prompts have no response: the same command asks them again"
    yield f"results: {summary.folder}"


def grid_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows with aligned columns, the first column to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *rest = (
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *rest]).rstrip()


def _with_interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.4f}"
    return f"{estimate.value:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]"
