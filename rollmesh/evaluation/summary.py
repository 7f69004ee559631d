"""The result of an evaluation, computed from its responses: metrics with confidence intervals, in all and by source.

Invariants: a response without a score is no zero: it is counted apart. Metrics are means over prompts, so that a
prompt counts the same however many of its responses were scored.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rollmesh.learner.evaluation.intervals import LEVEL, Estimate, estimate_mean
from rollmesh.learner.evaluation.metrics import prompt_metrics, vote_of

PromptRecord = Mapping[str, Any]
"""A prompt with its responses (`rollmesh.learner.evaluation.result.prompt_record`)."""


@dataclass(frozen=True, slots=True)
class EvaluationSummary:
    """An evaluation in one page.

    Attributes:
        name: of the model.
        folder: of the evaluation.
        metrics: mean@n, maj@n, best@n, pass@k, each with its interval.
        by_source: the same by data source.
        prompts: asked, answered, left out (empty or too long), and without any scored response.
        scored, unscored: responses.
        reasons: of the unscored ones, with their counts.
        response_tokens: mean over all responses.
        truncated: share of responses that the token budget has ended.
        complete: every prompt has responses.
    """

    name: str
    folder: str
    metrics: dict[str, Estimate]
    by_source: dict[str, dict[str, Estimate]]
    prompts: dict[str, int]
    scored: int
    unscored: int
    reasons: dict[str, int]
    response_tokens: float | None
    truncated: float | None
    complete: bool

    def to_json(self) -> dict[str, Any]:
        """The summary as JSON."""
        return {**asdict(self), "level": LEVEL}


def summarize_records(
    records: Iterable[PromptRecord], *, name: str, folder: str, asked: int, n: int, right_at: float
) -> EvaluationSummary:
    """The result of an evaluation.

    Args:
        records: its prompts.
        name, folder: see `EvaluationSummary`.
        asked: prompts of the evaluation.
        n: responses asked for per prompt.
        right_at: reward from which a response is right.
    """
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    reasons: Counter[str] = Counter()
    tokens: list[int] = []
    answered = left_out = judged = scored_count = truncated = 0
    for record in records:
        if "refused" in record:
            left_out += 1
            continue
        answered += 1
        tokens += [response["tokens"] for response in record["responses"] if response["finish"]]
        truncated += sum(response["finish"] == "length" for response in record["responses"])
        reasons.update(response["reason"] or "unscored" for response in unscored_responses(record))
        scored = scored_responses(record)
        scored_count += len(scored)
        judged += bool(scored)
        for metric, value in prompt_metrics(scored, n=n, right_at=right_at).items():
            values[record["data_source"]][metric].append(value)
    lost = max(0, asked - answered - left_out)
    return EvaluationSummary(
        name=name,
        folder=folder,
        metrics=_estimates(_together(values.values())),
        by_source={source: _estimates(found) for source, found in sorted(values.items())},
        prompts={
            "asked": asked,
            "answered": answered,
            "left_out": left_out,
            "without_score": asked - left_out - judged,
        },
        scored=scored_count,
        unscored=n * (asked - left_out) - scored_count,
        reasons=dict(reasons.most_common()) | ({"no response": n * lost} if lost else {}),
        response_tokens=fmean(tokens) if tokens else None,
        truncated=truncated / len(tokens) if tokens else None,
        complete=not lost,
    )


def scored_responses(record: PromptRecord) -> list[tuple[float, str]]:
    """Reward and answer of the scored responses to a prompt."""
    return [
        (response["reward"], vote_of(response["text"], response.get("answer")))
        for response in record["responses"]
        if response["reward"] is not None
    ]


def unscored_responses(record: PromptRecord) -> list[Mapping[str, Any]]:
    """The responses to a prompt that have no score."""
    return [response for response in record["responses"] if response["reward"] is None]


def _together(sources: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = defaultdict(list)
    for source in sources:
        for metric, found in source.items():
            values[metric] += found
    return values


def _estimates(values: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    return {metric: estimate_mean(found) for metric, found in values.items()}
