"""The alerts as the Prometheus operator takes them: `python -m deploy.kubernetes.prometheus_rule FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

ALERTS = Path(__file__).resolve().parent.parent / "observability" / "alerts.yaml"
_HEAD = "# Written by `make docs` from deploy/observability/alerts.yaml.\n"


def text() -> str:
    """A PrometheusRule with all groups of alerts."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "rollmesh"},
        "spec": yaml.safe_load(ALERTS.read_text(encoding="utf-8")),
    }
    return _HEAD + yaml.safe_dump(rule, sort_keys=False, allow_unicode=True, width=1000)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(), encoding="utf-8")
