"""The way of the weights to each generator, as rows of a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.report.table_lines import format_bytes

if TYPE_CHECKING:
    from rollmesh.protos import weights_pb2
    from rollmesh.report.summary import Summary

# Moments after the announcement, except for the pause, which is a duration.
_STAGES = {
    "first_byte": "first byte",
    "last_byte": "last byte",
    "pause": "pause",
    "total": "in service",
    "ack": "acknowledged",
}
# Receivers named in a line.
_NAMED = 8
_CHOICE = "full versions come over"
_HEAD = ["receiver", "versions", "failed", "last", *(f"{title}, ms" for title in _STAGES.values()), "last failure"]


def read_receivers(folder: Path) -> dict[str, Any]:
    """Each generator's report, as the learner wrote it at the end of the run; empty without one."""
    try:
        found = json.loads((folder / "learner.json").read_text(encoding="utf-8"))["pushes"]["receivers"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def push_rows(summary: Summary, receivers: Mapping[str, Any]) -> list[list[str]]:
    """Head, all receivers together, and each by itself: the last push, and p50 / p99 of all.

    Args:
        summary: of the run.
        receivers: see `read_receivers`.
    """
    push = summary.weight_push_ms
    quantiles = {"total": (push.get("p50"), push.get("p99"))}
    for stage in _STAGES:
        quantiles.setdefault(stage, (push.get(f"{stage}_p50"), push.get(f"{stage}_p99")))
    rows = [[*_HEAD, _CHOICE], ["all", "", "", "", *(_cell(None, *quantiles[stage]) for stage in _STAGES), "", ""]]
    for receiver, found in receivers.items():
        last, error = found.get("last", {}), found.get("last_error")
        cells = [
            _cell(last.get(f"{stage}_ms"), found.get(f"{stage}_ms_p50"), found.get(f"{stage}_ms_p99"))
            for stage in _STAGES
        ]
        failure = f"{error['version']}: {error['error']}" if error else ""
        counts = [str(found.get(name, 0)) for name in ("count", "errors")]
        rows.append([receiver, *counts, _describe(last), *cells, failure, last.get("choice") or "-"])
    return rows


def live_rows(pushes: weights_pb2.PushesResponse, most: int | None = None) -> list[list[str]]:
    """Rows for a run in progress, from the learner's reports; without the row of totals.

    Args:
        pushes: of the learner.
        most: rows of receivers, those with failures first; the last one sums up the rest. None: one for each.
    """
    rows, receivers = [_HEAD], list(pushes.receivers)
    others: list[weights_pb2.ReceiverPushes] = []
    if most is not None and len(receivers) > most:
        receivers.sort(key=lambda entry: -entry.errors)
        receivers, others = receivers[: most - 1], receivers[most - 1 :]
    for entry in receivers:
        reported = entry.HasField("last")
        last = {
            "version": str(PolicyVersion.from_proto(entry.last.policy)),
            "transport": entry.last.transport,
            "encoding": entry.last.encoding,
            "source": entry.last.source,
            "bytes": entry.last.bytes,
        }
        cells = []
        for stage in _STAGES:
            of_all = getattr(entry, f"{stage}_us")
            newest = entry.last_ack_us if stage == "ack" else getattr(entry.last, f"{stage}_us")
            known = reported and (stage != "ack" or newest > 0)
            cells.append(_cell(newest / 1e3 if known else None, of_all.p50 / 1e3, of_all.p99 / 1e3))
        failure = ""
        if entry.last_error:
            failure = f"{PolicyVersion.from_proto(entry.last_error_policy)}: {entry.last_error}"
        what = _describe(last) if reported else "-"
        rows.append([entry.member_id, str(entry.count), str(entry.errors), what, *cells, failure])
    if others:
        every = [[getattr(entry, f"{stage}_us") for entry in others] for stage in _STAGES]
        largest = [(max(of.p50 for of in stage) / 1e3, max(of.p99 for of in stage) / 1e3) for stage in every]
        counts = (sum(entry.count for entry in others), sum(entry.errors for entry in others))
        cells = [_cell(None, *quantiles) for quantiles in largest]
        rows.append([f"{len(others)} others, the slowest", *map(str, counts), "-", *cells, ""])
    return rows


def transport_choices(pushes: weights_pb2.PushesResponse) -> list[str]:
    """Lines about the transport of full versions, with the reasons against cheaper ones; one per choice."""
    found: dict[str, list[str]] = {}
    for entry in pushes.receivers:
        if entry.last.choice:
            found.setdefault(entry.last.choice, []).append(entry.member_id)
    return [f"{_named(sorted(names))}: {_CHOICE} {choice}" for choice, names in found.items()]


def _named(names: Sequence[str]) -> str:
    others = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + others


def _describe(last: Mapping[str, Any]) -> str:
    if not last:
        return "-"
    source = f" from {last['source']}" if last.get("source") else ""
    return f"{last['version']}: {format_bytes(last['bytes'])} {last['encoding']} over {last['transport']}{source}"


def _cell(last: float | None, p50: float | None, p99: float | None) -> str:
    """`last (p50 / p99)`; unknown values are a dash."""
    parts: Sequence[str] = ["-" if value is None else f"{value:.3g}" for value in (last, p50, p99)]
    return f"{parts[1]} / {parts[2]}" if last is None else f"{parts[0]} ({parts[1]} / {parts[2]})"
