"""The training data of a configuration: its rows, and their order after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.learner.coordinator.prompt_sources import open_training_rows
from rollmesh.mesh.config import load_config
from tests.learner.data.conftest import record, write_jsonl

CURRICULUM = """
def curriculum(progress):
    return {"easy": 1.0} if progress.prompts < 64 else {"easy": 1.0, "hard": 3.0}
"""


@pytest.mark.parametrize("kind", ["plain", "weighted", "taught"])
def test_a_restart_continues_with_the_rows_that_come_next(tmp_path: Path, kind: str) -> None:
    sources: list[dict[str, Any]] = [
        {"path": str(write_jsonl(tmp_path / f"{name}.jsonl", [record(i) for i in rows])), "name": name}
        for name, rows in (("easy", range(10)), ("hard", range(10, 40)))
    ]
    data: dict[str, Any] = {"train": sources}
    if kind == "weighted":
        sources[0]["weight"], sources[1]["weight"] = 3.0, 1.0
    if kind == "taught":
        (tmp_path / "plan.py").write_text(CURRICULUM)
        data["curriculum"] = f"{tmp_path / 'plan.py'}:curriculum"
    config = load_config({"model": {"path": "m"}, "data": data})

    def prompts(first: int, last: int) -> list[Any]:
        rows, order = open_training_rows(config)
        return [row.prompt for row in rows.rows([order.locate(ordinal)[1] for ordinal in range(first, last)])]

    whole = prompts(1, 161)
    assert prompts(101, 161) == whole[100:]
    easy = sum(int(str(prompt).partition("+")[0]) < 10 for prompt in whole)
    assert abs(easy - {"plain": 40, "weighted": 120, "taught": 64 + 24}[kind]) <= 2
