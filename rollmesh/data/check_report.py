"""The report of `rollmesh data check`, in words and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from rollmesh.data.check import DataReport, Finding, SourceReport
from rollmesh.mesh.chat.description import describe
from rollmesh.mesh.chat.facts import TemplateFacts

_QUANTILES = (("least", 0.0), ("median", 0.5), ("95%", 0.95), ("99%", 0.99), ("most", 1.0))
_LEVELS = ("errors", "warnings", "notes")
_BAR = 30
# Characters of a piece of a row; its middle is left out.
_SHOWN = 400


def quantile(counts: Counter[int], share: float) -> int:
    """The least value that is not below this share of all values."""
    left = share * counts.total()
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return max(counts)


def histogram(lengths: Counter[int]) -> list[tuple[int, int]]:
    """(upper bound, number of prompts) of each power of two from the shortest to the longest prompt."""
    buckets = Counter[int]()
    for length, count in lengths.items():
        buckets[1 << max(0, length - 1).bit_length()] += count
    bound, most, found = min(buckets), max(buckets), []
    while bound <= most:
        found.append((bound, buckets[bound]))
        bound *= 2
    return found


def lines(report: DataReport, emphasize: Callable[[str], str] = str) -> Iterator[str]:
    """The report in words.

    Args:
        report: of all data.
        emphasize: marks a text that is trained, with colours for example.
    """
    if report.template is not None:
        yield "chat template:"
        yield from template_lines(report.template)
    for remark in report.remarks:
        yield f"note: {remark}"
    for source in report.sources:
        yield f"{source.key}: {source.label}: {source.rows} rows"
        for name, count in source.data_sources.most_common():
            yield f"  data_source {name}: {count}"
        yield from _lengths(source, report)
        for finding in source.findings.values():
            level = "ERROR" if finding.fails else "note" if finding.note else "warning"
            yield f"  {level}: {finding.count} x {finding.what}"
            for example in finding.examples:
                yield f"    {example}"
    yield from _row(report, emphasize)
    counts = _counts(report)
    found = ", ".join(f"{name}: {count}" for name, count in counts.items())
    yield found if any(counts.values()) else "nothing is wrong"


def _counts(report: DataReport) -> dict[str, int]:
    counts = {name: len(getattr(report, name)) for name in _LEVELS}
    return counts | {"notes": counts["notes"] + len(report.remarks)}


def template_lines(facts: TemplateFacts) -> Iterator[str]:
    """Facts about a chat template, one per line."""
    found = list(describe(facts))
    width = max(len(name) for name, _ in found)
    for name, words in found:
        yield f"  {name:<{width}}  {words}"


def _row(report: DataReport, emphasize: Callable[[str], str]) -> Iterator[str]:
    if not report.row:
        return
    counted, tokens = (sum(p.tokens for p in report.row if p.trained or every) for every in (False, True))
    if report.measured == "prompt":
        yield f"the first prompt ({tokens} tokens), after which the model answers:"
    else:
        yield f"the first row as it is trained ({counted} of {tokens} tokens count):"
    for piece in report.row:
        text = json.dumps(piece.text, ensure_ascii=False)
        text = text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"
        yield "  " + (f"trained  {emphasize(text)}" if piece.trained else f"context  {text}")


def _lengths(source: SourceReport, report: DataReport) -> Iterator[str]:
    if not source.lengths:
        return
    marks = ", ".join(f"{name} {quantile(source.lengths, share)}" for name, share in _QUANTILES)
    yield f"  tokens of a {report.measured} (at most {report.max_tokens}): {marks}"
    buckets = histogram(source.lengths)
    longest = max(count for _, count in buckets)
    for bound, count in buckets:
        yield f"    up to {bound:>7}: {count:>9} {'#' * round(_BAR * count / longest)}"


def to_json(report: DataReport) -> dict[str, Any]:
    """The report for programs."""
    return {
        f"max_{'prompt_' if report.measured == 'prompt' else ''}tokens": report.max_tokens,
        **_counts(report),
        "remarks": report.remarks,
        "sources": [_source(source, report.measured) for source in report.sources],
        "template": dict(describe(report.template)) if report.template is not None else None,
        "row": [asdict(piece) for piece in report.row],
    }


def _source(source: SourceReport, measured: str) -> dict[str, Any]:
    findings: list[Finding] = list(source.findings.values())
    lengths = {name: quantile(source.lengths, share) for name, share in _QUANTILES} if source.lengths else {}
    return {
        "key": source.key,
        "source": source.label,
        "rows": source.rows,
        "data_sources": dict(source.data_sources),
        f"{measured}_tokens": lengths,
        "histogram": [list(bucket) for bucket in histogram(source.lengths)] if source.lengths else [],
        "findings": [asdict(finding) for finding in findings],
    }
