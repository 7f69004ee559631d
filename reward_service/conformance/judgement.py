"""Judges an answer by the contract: what callers refuse, and what they should not have to live with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.validation import match_answer
from rollmesh.reward_service.conformance.findings import Severity

Fault = tuple[Severity, str, str]
"""Severity, message, remedy."""

_REMEDIES = {
    "missing_result": "each item needs one result with its item_id, also when scoring fails (`error`)",
    "duplicate_result": "each item needs exactly one result",
    "no_outcome": "set one of scored, unscorable, error",
    "nan": "totals, components, per-token values and spans must be finite; a failed computation is an `error`",
    "per_token_length": "per_token must be empty or have one value per entry of response_ids",
    "bad_span": "begin and end count characters (Unicode code points) of the response, not bytes or UTF-16 units",
}
_LONGEST_PAUSE_MS = 600_000


def faults_of_answer(
    items: Sequence[reward_pb2.ScoreItem], results: Sequence[reward_pb2.ScoreResult]
) -> Iterator[Fault]:
    """The faults of an answer to a Score call; of each kind one, with an example."""
    matched = match_answer(items, reward_pb2.ScoreResponse(results=results))
    if matched.unknown_ids:
        ids = ", ".join(map(repr, matched.unknown_ids[:3]))
        yield "error", f"{len(matched.unknown_ids)} results for unknown items ({ids})", "echo item_id, letter by letter"
    own = {result.item_id: result for result in results}
    broken: dict[str, list[reward_pb2.ScoreResult]] = {}
    for result in matched.results:
        if result.HasField("error") and result != own.get(result.item_id):
            broken.setdefault(result.error.code, []).append(result)
    for code, those in broken.items():
        message = f"{code}: {_some(those, items)}: {those[0].error.message}"
        yield "error", message, _REMEDIES.get(code, "")
    yield from faults_of_errors([result for result in results if result.HasField("error")], items)


def faults_of_errors(
    failed: Sequence[reward_pb2.ScoreResult], items: Sequence[reward_pb2.ScoreItem]
) -> Iterator[Fault]:
    """The faults of results that say that scoring failed."""
    if without := [result for result in failed if not result.error.code]:
        yield "warning", f"an error without a code: {_some(without, items)}", "runs count failures by their codes"
    if final := [each for each in failed if each.error.code == "not_begun" and not each.error.retryable]:
        message = f"`not_begun` that is not retryable: {_some(final, items)}"
        yield "error", message, "set retryable: the item is no failure, it waits for its turn"
    if vain := [each for each in failed if each.error.retry_after_ms and not each.error.retryable]:
        message = f"retry_after_ms of an error that is not retryable: {_some(vain, items)}"
        yield "warning", message, "set retryable, or leave retry_after_ms out"
    if late := [each for each in failed if each.error.retry_after_ms > _LONGEST_PAUSE_MS]:
        message = f"retry_after_ms of {late[0].error.retry_after_ms / 1000:.0f} s: {_some(late, items)}"
        yield "warning", message, "it is milliseconds; no caller waits longer than 10 minutes"


def _some(those: Sequence[reward_pb2.ScoreResult], items: Sequence[reward_pb2.ScoreItem]) -> str:
    return f"{len(those)} of {len(items)} items, such as {those[0].item_id!r}"
