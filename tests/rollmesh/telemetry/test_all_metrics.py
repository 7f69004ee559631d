"""The reference of all metrics: complete, consistent, and as it was released."""

from __future__ import annotations

import re

import pytest

from rollmesh.telemetry.all_metrics import METRICS, metric_of
from rollmesh.telemetry.docs_reference import with_reference
from tests.repository import REPOSITORY

PAGE = REPOSITORY / "docs" / "metrics.md"
RELEASED = REPOSITORY / "tests" / "golden" / "metric_names.txt"
SPECS = [spec for metrics in METRICS.values() for spec in metrics]


def test_the_page_lists_every_metric() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_reference(page) == page, "run `make docs`"


def test_names_stay_what_they_were() -> None:
    """Alerts and dashboards of users name them: a rename is for a release that says so."""
    released = RELEASED.read_text(encoding="utf-8").split()
    names = sorted(spec.full_name for spec in SPECS)
    assert released == sorted(released)
    assert [name for name in released if name not in names] == [], "renamed or removed"
    assert [name for name in names if name not in released] == [], f"new: add them to {RELEASED.name}"


def test_names_are_prometheus() -> None:
    for spec in SPECS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", spec.full_name), spec
        assert not re.search(r"_(ms|us|mb|percent|count|sum|bucket|info)$", spec.full_name), spec
        assert not spec.name.endswith("_total"), spec
        assert "le" not in spec.labels
        assert spec.text
        assert spec.text[-1] not in ".:", spec


def test_no_two_metrics_share_a_family() -> None:
    families = [spec.family for spec in SPECS]
    assert sorted(set(families)) == sorted(families)


def test_series_are_found_by_their_names() -> None:
    assert metric_of("rollmesh_buffer_groups").labels == ("table", "state")
    assert metric_of("rollmesh_event_loop_lag_seconds_bucket").kind == "histogram"
    with pytest.raises(KeyError):
        metric_of("rollmesh_buffer_groups_total")
