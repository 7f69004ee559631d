"""A reward service's part of the traces."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollmesh.mesh.telemetry.tracing import Tracer
from rollmesh.protos import reward_pb2


def record_scores(
    tracer: Tracer, items: Sequence[reward_pb2.ScoreItem], results: Sequence[reward_pb2.ScoreResult], began_ns: int
) -> None:
    """Reports `score` of each item, inside the generator's `reward`; items of others than generators have no trace."""
    now_ns = time.time_ns()
    for item, result in zip(items, results, strict=True):
        group_id, _, rest = item.item_id.partition("/")
        attempt, _, member = rest.partition("/")
        if not (item.group_id == group_id and attempt.isdecimal() and member.isdecimal()):
            continue
        if (trace := tracer.trajectory(group_id, int(member))) is None:
            continue
        outcome = result.WhichOneof("outcome") or "none"
        attributes = {"outcome": outcome, "data_source": item.data_source}
        failure = ""
        if outcome == "scored":
            attributes |= {f"component.{name}": value for name, value in result.scored.components.items()}
            attributes["reward"] = result.scored.total
        elif outcome == "error":
            failure = f"{result.error.code}: {result.error.message}"
        trace.record(
            "score", began_ns, now_ns, attributes, number=int(attempt), inside=("reward", int(attempt)), failure=failure
        )  # fmt: skip
