"""Evaluations and comparisons as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rollmesh.evaluation.compared import Comparison
from rollmesh.evaluation.comparison import Measured, PairedMetric, other_settings
from rollmesh.evaluation.runs import changed_settings, run_outcome
from rollmesh.evaluation.summary import EvaluationSummary, summarize_records
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


def all_lines(comparison: Comparison) -> Iterator[str]:
    """A comparison in full: the models, each pair, and the runs."""
    measured = comparison.measured
    if measured:
        yield from measured_lines(measured)
    for other, found in zip(measured[1:], comparison.pairs, strict=True):
        yield ""
        yield from comparison_lines(measured[0], other, found)
    if comparison.runs:
        yield from [""] if measured else []
        yield from run_lines(comparison.runs)


def measured_lines(everyone: Sequence[Measured]) -> Iterator[str]:
    """The metrics of several models, each over its own prompts."""
    rows = []
    for measured in everyone:
        asked = len(measured.records)
        summary = summarize_records(
            measured.records, name=measured.name, folder="", asked=asked, n=measured.n, right_at=measured.right_at
        )
        rows += [
            [measured.name, name, f"{found.value:.4f}", interval_text(found), str(found.prompts)]
            for name, found in summary.metrics.items()
        ]
    yield from grid_lines([["model", "metric", "mean", INTERVAL, "prompts"], *rows])


def comparison_lines(baseline: Measured, other: Measured, found: Sequence[PairedMetric]) -> Iterator[str]:
    """A paired comparison: a row for each metric, of all prompts and of each source."""
    yield f"{other.name} against {baseline.name}, over the prompts that both have answered"
    for setting in other_settings(baseline, other):
        yield f"measured otherwise: {setting}"
    rows = [
        [
            paired.source,
            paired.metric,
            f"{paired.baseline:.4f}",
            f"{paired.other:.4f}",
            f"{paired.difference.value:+.4f}",
            interval_text(paired.difference),
            f"{paired.wins}/{paired.losses}/{paired.ties}",
            paired.verdict,
        ]
        for paired in found
    ]
    head = ["data_source", "metric", "baseline", "other", "difference", INTERVAL, "win/loss/tie", "the other is"]
    yield from grid_lines([head, *rows])


def run_lines(runs: Sequence[Path]) -> Iterator[str]:
    """Runs side by side, and what was set otherwise than in the first."""
    outcomes = [run_outcome(run) for run in runs]
    names = [run.name for run in runs]
    rows = [[name, *(_value(outcome[name]) for outcome in outcomes)] for name in outcomes[0]]
    yield from grid_lines([["run", *names], *rows])
    for run, changes in changed_settings(runs).items():
        yield f"{run}: {'; '.join(changes) or 'the same settings'}"


def _value(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


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
