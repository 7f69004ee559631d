"""Checks a server's answer against the request: what a reward server can get wrong is caught here, by name.

Invariant: one result per item comes out; an answer that breaks the contract becomes an error result.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.outcomes import SpanValue, characters_of, error_result, is_finite

# Components go with each member, and each name becomes a metric.
_MOST_COMPONENTS, _NAME_LENGTH = 256, 200


@dataclass(frozen=True, slots=True)
class Matched:
    """Results in the order of the items, and the ids in the answer that were not asked for."""

    results: list[reward_pb2.ScoreResult]
    unknown_ids: list[str]


def match_answer(items: Sequence[reward_pb2.ScoreItem], response: reward_pb2.ScoreResponse) -> Matched:
    """Pairs items with results by item_id.

    Codes of what breaks the contract: missing_result (retryable), duplicate_result, no_outcome, nan,
    per_token_length, bad_span.
    """
    by_id = {result.item_id: result for result in without_repeats(response.results)}
    results = []
    for item in items:
        result = by_id.pop(item.item_id, None)
        if result is None:
            results.append(
                error_result(item.item_id, "missing_result", "the answer has no result for it", retryable=True)
            )
        else:
            fault = contract_fault(item, result)
            results.append(error_result(item.item_id, *fault, retryable=False) if fault else result)
    return Matched(results, list(by_id))


def without_repeats(results: Sequence[reward_pb2.ScoreResult]) -> Sequence[reward_pb2.ScoreResult]:
    """The results of an answer; one error, `duplicate_result`, in place of several results for one item."""
    counts = Counter(result.item_id for result in results)
    if len(counts) == len(results):
        return results
    unique = {result.item_id: result for result in results}
    for item_id, count in counts.items():
        if count > 1:
            message = f"the answer has {count} results for it"
            unique[item_id] = error_result(item_id, "duplicate_result", message, retryable=False)
    return list(unique.values())


def contract_fault(item: reward_pb2.ScoreItem, result: reward_pb2.ScoreResult) -> tuple[str, str] | None:
    """(code, message) of the first rule of the contract that a result breaks; None for a good one."""
    outcome = result.WhichOneof("outcome")
    if outcome is None:
        return "no_outcome", "the result is neither scored, unscorable nor error"
    if outcome != "scored":
        return None
    scored = result.scored
    if not is_finite(scored.total):
        return "nan", f"total is {scored.total}"
    if len(scored.components) > _MOST_COMPONENTS:
        return "components", f"{len(scored.components)} components, {_MOST_COMPONENTS} are the most"
    for name, value in scored.components.items():
        if len(name) > _NAME_LENGTH:
            return "components", f"a component's name has {len(name)} characters, {_NAME_LENGTH} are the most"
        if not is_finite(value):
            return "nan", f"component {name!r} is {value}"
    if scored.per_token:
        if len(scored.per_token) != len(item.response_ids):
            return (
                "per_token_length",
                f"{len(scored.per_token)} per-token values for {len(item.response_ids)} response tokens",
            )
        if not all(map(math.isfinite, scored.per_token)):
            return "nan", "a per-token value is not finite"
    if not math.isfinite(scored.cost):
        return "nan", f"cost is {scored.cost}"
    return _span_fault(item, scored) if scored.spans else None


def _span_fault(item: reward_pb2.ScoreItem, scored: reward_pb2.Scored) -> tuple[str, str] | None:
    for sent in scored.spans:
        span = SpanValue(sent.begin, sent.end, sent.value, sent.turn, sent.of_total)
        if fault := span.fault(characters_of(span.turn, item.response, item.turns), item.turn_count):
            return "bad_span", f"span {fault}"
        if not math.isfinite(span.value):
            return "nan", f"the value of span {span.begin}:{span.end} is {span.value}"
    return None
