"""The table of layouts by model in docs/megatron.md is what the planner finds."""

from __future__ import annotations

import re

import pytest

from rollmesh.planning.docs_reference import DEVICES, HEADER, MODELS, main, row
from tests.repository import REPOSITORY
from tests.rollmesh.planning.plans import ARCHITECTURES

PAGE = REPOSITORY / "docs" / "megatron.md"
TEXT = PAGE.read_text(encoding="utf-8")
TABLE = TEXT.partition("<!-- layouts: begin -->")[2].partition("<!-- layouts: end -->")[0]
LINES = [line.split(" | ") for line in re.findall(r"^\| (.*) \|$", TABLE, re.MULTILINE)]


def test_the_table_has_every_model_on_every_number_of_devices() -> None:
    header, _, *rows = LINES
    assert tuple(header) == HEADER
    assert [(name, int(devices)) for name, devices, *_ in rows] == [
        (name, devices) for name in MODELS.values() for devices in DEVICES
    ]


@pytest.mark.parametrize(
    ("model", "devices"),
    [("llama-3.1-8b", 8), ("mixtral-8x7b", 64), pytest.param("qwen2.5-32b", 64, marks=pytest.mark.exhaustive)],
)
def test_a_row_is_what_the_planner_finds(model: str, devices: int) -> None:
    (written,) = [cells for cells in LINES[2:] if cells[:2] == [MODELS[model], str(devices)]]
    assert written == list(row(ARCHITECTURES, model, devices)), "run `make docs`"


def test_the_command_writes_the_table_between_its_marks(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.planning.docs_reference.MODELS", {"llama-3.1-8b": "Llama-3.1-8B"})
    written = tmp_path / "page.md"
    written.write_text("before\n<!-- layouts: begin -->\nold\n<!-- layouts: end -->\nafter\n")

    assert main([str(written), "--architectures", str(ARCHITECTURES)]) == 0

    before, first, *_, last, after = written.read_text().splitlines()
    assert (before, first, last, after) == ("before", "<!-- layouts: begin -->", "<!-- layouts: end -->", "after")
    assert "old" not in written.read_text()
    assert "| Llama-3.1-8B | 64 | " in written.read_text()
