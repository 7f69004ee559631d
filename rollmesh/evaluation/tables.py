"""Evaluations and comparisons as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollmesh.evaluation.summary import EvaluationSummary
from rollmesh.learner.evaluation.intervals import LEVEL, Estimate

# Columns of a table that hold names.
_TEXTS = 2
INTERVAL = f"{LEVEL:.0%} interval"


def summary_lines(summary: EvaluationSummary) -> Iterator[str]:
    """An evaluation: a row for each metric, of all prompts and of each source."""
    prompts = summary.prompts
    yield f"{summary.name}: {prompts['answered']} of {prompts['asked']} prompts, {summary.scored} responses scored"
    yield ""
    parts = {"all": summary.metrics} | (summary.by_source if len(summary.by_source) > 1 else {})
    table = [
        [source, name, f"{found.value:.4f}", interval_text(found), str(found.prompts)]
        for source, metrics in parts.items()
        for name, found in metrics.items()
    ]
    yield from grid_lines([["data_source", "metric", "mean", INTERVAL, "prompts"], *table])
    yield ""
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
    """Rows with aligned columns, texts to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if index < _TEXTS else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def interval_text(estimate: Estimate) -> str:
    """The interval of a mean; a dash where it is not known."""
    if estimate.low is None or estimate.high is None:
        return "-"
    return f"[{estimate.low:.4f}, {estimate.high:.4f}]"
