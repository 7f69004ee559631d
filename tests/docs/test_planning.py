"""The table of plans says what `rollmesh plan` finds: some of its rows again, and the page has all of them."""

from __future__ import annotations

import re

import pytest

from benchmarks.learner.plans import HEADER, MODELS, SIZES, row
from tests.repository import REPOSITORY

PAGE = (REPOSITORY / "docs" / "planning.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("<!-- generated: plans -->")[2].partition("<!-- end of plans -->")[0]
LINES = [line.split(" | ") for line in re.findall(r"^\| (.*) \|$", TABLE, re.MULTILINE)]


def test_the_table_has_every_model_on_every_number_of_devices() -> None:
    header, _, *rows = LINES
    assert tuple(header) == HEADER
    assert [(model, int(devices)) for model, devices, *_ in rows] == [
        (model, devices) for model in MODELS.values() for devices in SIZES
    ]
    for _, _, rank, host, fits, switches, layout in rows:
        assert float(rank) > 0
        assert float(host) > 0
        assert (fits == "yes") == (not switches.strip())
        assert layout


@pytest.mark.parametrize(("model", "devices"), [("qwen3-0.6b", 8), ("qwen2.5-7b", 1), ("qwen2.5-7b", 64)])
def test_a_row_is_what_the_plan_finds(model: str, devices: int) -> None:
    (written,) = [cells for name, number, *cells in LINES[2:] if (name, number) == (MODELS[model], str(devices))]
    assert [cell.strip() for cell in written] == list(row(model, devices).cells())
