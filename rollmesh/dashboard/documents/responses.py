"""The result of `rollmesh eval`: its metrics by source, and its responses."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollmesh.report.metrics import read_metrics

_SHOWN = 24
_MOST_CHARACTERS = 20_000


def result_grid(evaluation: Mapping[str, Any]) -> list[list[str]]:
    """A row for each metric, of all prompts and of each source; the first row is the head."""
    parts = {"all": evaluation["metrics"]}
    if len(evaluation["by_source"]) > 1:
        parts |= evaluation["by_source"]
    interval = f"{evaluation['level']:.0%} interval"
    rows = [
        [source, name, f"{found['value']:.4f}", interval_text(found), str(found["prompts"])]
        for source, metrics in parts.items()
        for name, found in metrics.items()
    ]
    return [["data source", "metric", "mean", interval, "prompts"], *rows]


def interval_text(found: Mapping[str, Any]) -> str:
    """The confidence interval of a metric; empty where it has none."""
    if found.get("low") is None or found.get("high") is None:
        return ""
    return f"{found['low']:.3f} to {found['high']:.3f}"


def response_document(folder: Path) -> dict[str, Any] | None:
    """Responses as samples, those with the lowest rewards first; None without any."""
    lowest = heapq.nsmallest(_SHOWN, _responses(folder), key=lambda sample: float(sample["reward"]))
    return {"samples": lowest} if lowest else None


def _responses(folder: Path) -> Iterator[dict[str, Any]]:
    for record in read_metrics(folder / "responses.jsonl"):
        for member, response in enumerate(record.get("responses", ())):
            if response["reward"] is None:
                continue
            yield {
                "step": None,
                "group": f"row {record['row']}",
                "member": member,
                "prompt": str(record["prompt"])[:_MOST_CHARACTERS],
                "response": str(response["text"])[:_MOST_CHARACTERS],
                "ground_truth": str(record.get("ground_truth", ""))[:_MOST_CHARACTERS],
                "reward": response["reward"],
                "components": {},
                "data_source": record["data_source"],
                "finish_reason": response["finish"],
            }
