"""The ledger: groups by state and fate, the reasons for which they ended, and the causes of failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rollmesh.dashboard.run_view import RunView
from rollmesh.mesh.tables import TRAIN
from rollmesh.protos import buffer_pb2

STATES = {
    "generating": "being generated",
    "ready": "ready",
    "leased": "held by the learner",
    "consumed": "trained, not yet committed",
}
FATES = {"trained": "trained", "evicted_stale": "too stale", "filtered": "filtered", "failed": "failed"}
_CAUSES = 10


def ledger_document(view: RunView) -> dict[str, Any] | None:
    """Tables with their counts; None for a training on data, and before anything was counted."""
    if view.mesh is not None and view.mesh.table is not None:
        ledgers = {TRAIN: buffer_pb2.LedgerResponse(counters=view.mesh.table.counts), **view.mesh.ledgers}
        found = [_of_answer(name, ledger) for name, ledger in ledgers.items()]
    elif view.run_summary is not None:
        found = [
            _table(name, one["counters"], one["reasons"], one["discrepancies"], one["causes"])
            for name, one in view.run_summary.ledger.items()
        ]
    else:
        return None
    tables = [table for table in found if table["admitted"]]
    return {"tables": tables} if tables else None


def _of_answer(name: str, answer: buffer_pb2.LedgerResponse) -> dict[str, Any]:
    counters = {field: int(getattr(answer.counters, field)) for field in ("admitted", *STATES, *FATES)}
    causes = Counter(cause for group in answer.failed for cause in group.causes if cause)
    reasons = dict(answer.counters.reasons)
    return _table(name, counters, reasons, list(answer.discrepancies), dict(causes.most_common(_CAUSES)))


def _table(
    name: str,
    counters: Mapping[str, int],
    reasons: Mapping[str, int],
    discrepancies: list[str],
    causes: Mapping[str, int],
) -> dict[str, Any]:
    counted = sum(counters[field] for field in (*STATES, *FATES))
    if counted != counters["admitted"] and not discrepancies:
        discrepancies = [f"admitted {counters['admitted']}, but {counted} groups are counted"]
    return {
        "name": name,
        "admitted": counters["admitted"],
        "states": [{"kind": kind, "name": words, "count": counters[kind]} for kind, words in STATES.items()],
        "fates": [{"kind": kind, "name": words, "count": counters[kind]} for kind, words in FATES.items()],
        "drops": [{"fate": fate, "reason": why, "count": count} for fate, why, count in _drops(reasons)],
        "causes": [{"cause": cause, "count": count} for cause, count in causes.items()],
        "discrepancies": discrepancies,
    }


def _drops(reasons: Mapping[str, int]) -> Iterator[tuple[str, str, int]]:
    """Ends of groups that were not trained, the most frequent first."""
    for end, count in sorted(reasons.items(), key=lambda item: -item[1]):
        fate, _, why = end.partition("/")
        if fate != "trained":
            yield FATES.get(fate, fate), why.replace("_", " ") or "-", count
