"""Grafana's dashboard of a mesh: `python -m rollmesh.telemetry.grafana PATH` writes it.

It is generated so that it stays true: each query names its metric by the declaration.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.telemetry.all_metrics import metric_of

UID = "rollmesh"
_NAME = re.compile(r"rollmesh_\w+")
_WIDTH, _HEIGHT, _ROW = 8, 7, 24
# Several fronts show the same values of the run.
_RUN = "max without (instance, pod)"
_CALLS = "rollmesh_reward_call_seconds_bucket"


@dataclass(frozen=True, slots=True)
class Panel:
    """A time series.

    Attributes:
        title: above it.
        unit: Grafana's name of its unit.
        queries: what is shown, by its legend.
    """

    title: str
    unit: str
    queries: Mapping[str, str]


ROWS: Mapping[str, Sequence[Panel]] = {
    "Learning": [
        Panel(
            "Reward",
            "none",
            {"training": "rollmesh_learner_reward", "held out": "rollmesh_learner_held_out_reward"},
        ),
        Panel("Entropy and KL", "none", {"entropy": "rollmesh_learner_entropy_nats", "KL": "rollmesh_learner_kl_nats"}),
        Panel("Gradient norm", "none", {"before clipping": "rollmesh_learner_gradient_norm"}),
        Panel(
            "Off-policy",
            "percentunit",
            {
                "effective sample size": "rollmesh_learner_effective_sample_size_ratio",
                "clipped tokens": "rollmesh_learner_clipped_tokens_ratio",
                "groups of equal rewards": "rollmesh_learner_zero_variance_groups_ratio",
            },
        ),
        Panel(
            "Staleness of trained tokens, in versions",
            "none",
            {"mean": "rollmesh_learner_staleness_versions", "oldest": "rollmesh_learner_staleness_max_versions"},
        ),
        Panel("Log-prob gap, nats per token", "none", {"mean": "rollmesh_learner_log_prob_gap_nats"}),
    ],
    "Progress": [
        Panel("Version", "none", {"in force": f"{_RUN} (rollmesh_buffer_policy_version)"}),
        Panel("Time of the last step", "s", {"{{phase}}": "rollmesh_learner_step_seconds"}),
        Panel("Since a group made progress", "s", {"unmoved": f"{_RUN} (rollmesh_buffer_unmoved_seconds)"}),
        Panel("Groups", "none", {"{{state}}": f'{_RUN} (rollmesh_buffer_groups{{table="train"}})'}),
        Panel(
            "Groups that ended, per second",
            "none",
            {"{{fate}} {{reason}}": f'{_RUN} (rate(rollmesh_buffer_groups_ended_total{{table="train"}}[5m]))'},
        ),
        Panel(
            "Who waits, seconds per second",
            "none",
            {
                "learner for groups": f"{_RUN} (rate(rollmesh_buffer_waiting_for_inserts_seconds_total[5m]))",
                "generators at the gate": f"{_RUN} (rate(rollmesh_buffer_waiting_for_samples_seconds_total[5m]))",
            },
        ),
    ],
    "Generators and rewards": [
        Panel(
            "Tokens per second",
            "none",
            {
                "sampled": "sum(rollmesh_generator_tokens_per_second)",
                "trained": "rollmesh_learner_trained_tokens_per_second",
            },
        ),
        Panel(
            "Age of the served weights, in versions",
            "none",
            {"{{instance}}": "scalar(max(rollmesh_buffer_policy_version)) - rollmesh_generator_weights_version"},
        ),
        Panel(
            "Members per second",
            "none",
            {"{{outcome}}": "sum by (outcome) (rate(rollmesh_generator_members_total[5m]))"},
        ),
        Panel(
            "Waiting for rewards",
            "none",
            {
                "members": "sum(rollmesh_generator_members_unscored)",
                "items in progress": "sum(rollmesh_reward_items_in_progress)",
            },
        ),
        Panel(
            "Duration of reward calls",
            "s",
            {
                f"p{percent}": f"histogram_quantile(0.{percent}, sum by (le) (rate({_CALLS}[5m])))"
                for percent in (50, 99)
            },
        ),
        Panel(
            "Weights: announcement to service",
            "s",
            {
                "p99": "histogram_quantile(0.99, sum by (le) "
                '(rate(rollmesh_generator_weights_seconds_bucket{stage="total"}[5m])))'
            },
        ),
    ],
    "Services": [
        Panel("Members of the mesh", "none", {"{{role}}": f"{_RUN} (rollmesh_buffer_members)"}),
        Panel(
            "Event loop lag, p99",
            "s",
            {"{{instance}}": "histogram_quantile(0.99, rate(rollmesh_event_loop_lag_seconds_bucket[5m]))"},
        ),
        Panel(
            "Warnings and errors per minute",
            "none",
            {"{{instance}} {{level}}": "60 * rate(rollmesh_log_records_total[5m])"},
        ),
        Panel(
            "Memory of Redis",
            "bytes",
            {
                "used": f"{_RUN} (rollmesh_buffer_redis_used_memory_bytes)",
                "most": f"{_RUN} (rollmesh_buffer_redis_max_memory_bytes)",
            },
        ),
        Panel("Payloads", "bytes", {"{{table}}": f"{_RUN} (rollmesh_buffer_payload_bytes)"}),
        Panel("Memory of processes", "bytes", {"{{instance}}": "process_resident_memory_bytes"}),
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports and provisions it."""
    return {
        "uid": UID,
        "title": "Rollmesh",
        "tags": ["rollmesh"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": list(_panels()),
    }


def names_of(expression: str) -> list[str]:
    """Our metrics in a query.

    Raises:
        KeyError: one of them is none.
    """
    return [metric_of(name).full_name for name in _NAME.findall(expression)]


def _panels() -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for title, panels in ROWS.items():
        number += 1
        yield {"id": number, "type": "row", "title": title, "panels": [], "gridPos": _place(0, y, _ROW, 1)}
        y += 1
        for index, panel in enumerate(panels):
            number += 1
            x = index * _WIDTH % _ROW
            yield _time_series(number, panel, _place(x, y, _WIDTH, _HEIGHT))
            if x + _WIDTH == _ROW:
                y += _HEIGHT


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _time_series(number: int, panel: Panel, place: Mapping[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    meaning = {
        spec.full_name: spec.text
        for expression in panel.queries.values()
        for spec in map(metric_of, names_of(expression))
    }
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": "\n".join(f"{name}: {text}" for name, text in meaning.items()),
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": source}
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(), encoding="utf-8")
