"""The table of architectures says what the probe finds: one architecture of every packing and verdict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.learner.architectures import REFUSED, probe
from benchmarks.learner.tiny_models import ARCHITECTURES
from tests.repository import REPOSITORY

PAGE = REPOSITORY / "docs" / "architectures.md"
ROWS = {
    name: cells.split(" | ")
    for name, cells in re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
}


def test_the_table_has_all_architectures() -> None:
    assert list(ROWS) == list(ARCHITECTURES)
    assert [cells[0] for cells in ROWS.values()] == [about.kind for about in ARCHITECTURES.values()]


@pytest.mark.parametrize("architecture", ["olmo2", "falcon_h1", "minimax", "xlstm"])
def test_a_row_is_what_the_probe_finds(architecture: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    found = probe(tmp_path / "model", architecture)
    _, packing, *memory = ROWS[architecture]
    assert found.packing == packing
    assert [each == REFUSED for each in found.found.values()] == [each == REFUSED for each in memory]
