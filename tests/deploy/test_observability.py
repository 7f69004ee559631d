"""Alerts and the dashboard: every query is about metrics that there are, and every alert fires and stays silent."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from rollmesh.telemetry import grafana
from rollmesh.telemetry.all_metrics import metric_of
from tests.repository import REPOSITORY

FOLDER = REPOSITORY / "deploy" / "observability"
DASHBOARD = FOLDER / "grafana" / "dashboards" / "rollmesh.json"
_SEVERITIES = {"critical", "warning", "info"}
_DEADLINE_S = 120


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _check_selectors(expression: str) -> None:
    """The metrics of a query exist, with the labels by which it selects."""
    for name, selector in re.findall(r"(rollmesh_\w+)(?:\{([^}]*)\})?", expression):
        labels = set(re.findall(r"(\w+)(?:=|!=|=~|!~)", selector))
        assert labels <= set(metric_of(name).labels), f"{name}{{{selector}}}"


def _anchors(page: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", (REPOSITORY / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("rule", _rules(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    _check_selectors(rule["expr"])
    assert rule["labels"]["severity"] in _SEVERITIES
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor in _anchors(page), rule["annotations"]["runbook"]
    listed = (REPOSITORY / "docs" / "telemetry.md").read_text(encoding="utf-8")
    assert f"| `{rule['alert']}` | {rule['labels']['severity']} |" in listed


def test_every_alert_is_tested_both_ways() -> None:
    tests = yaml.safe_load((FOLDER / "alerts.test.yaml").read_text(encoding="utf-8"))["tests"]
    expected = {(case["alertname"], bool(case["exp_alerts"])) for test in tests for case in test["alert_rule_test"]}
    assert expected == set(itertools.product((rule["alert"] for rule in _rules()), (True, False)))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (make system-packages)")
@pytest.mark.parametrize("arguments", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts.test.yaml")])
def test_prometheus_evaluates_the_alerts(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_current() -> None:
    assert DASHBOARD.read_text(encoding="utf-8") == grafana.text(), "run `make docs`"


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert (board["uid"], board["title"]) == ("rollmesh", "Rollmesh")
    assert board["schemaVersion"] >= 39
    panels = board["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not cells & taken, panel["title"]
        taken |= cells
    (source,) = board["templating"]["list"]
    for target in (target for panel in panels for target in panel.get("targets", ())):
        assert target["datasource"] == {"type": "prometheus", "uid": f"${{{source['name']}}}"}
        _check_selectors(target["expr"])
