"""The data in a report, as the page reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def read_panels(report: Path) -> dict[str, Any]:
    """The panels of a report by name."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', report.read_text(encoding="utf-8"))
    assert found is not None
    panels: dict[str, Any] = json.loads(found[1])["panels"][0]
    return panels


def read_facts(report: Path) -> dict[str, str]:
    """The summary in words of a report."""
    return dict(read_panels(report)["facts"]["rows"])


def read_attention(report: Path) -> list[str]:
    """The texts of what a reader should look at."""
    return [item["text"] for item in read_panels(report)["attention"]["items"]]


def read_charts(report: Path) -> set[str]:
    """The names of the charts of a report."""
    return {chart["name"] for chart in read_panels(report)["charts"]["charts"]}
