"""The page on operation names every wait; what it says of their deadlines is so."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel

import rollmesh.buffer.server.process
import rollmesh.cli.app
import rollmesh.learner.coordinator.coordinator
import rollmesh.learner.coordinator.training_loop
from rollmesh.launcher.services import _LEARNER_DRAIN_S
from rollmesh.learner.checkpoint.deadlines import COMMIT_S, EXPORT_S, LAST_S
from rollmesh.learner.coordinator.mesh_monitor import MeshMonitor
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.config import Config
from tests.repository import REPOSITORY

PAGE = (REPOSITORY / "docs" / "operations.md").read_text(encoding="utf-8")
# Names that are no setting, by the words of its row.
CONSTANTS = {
    "the claim's answer": rollmesh.learner.coordinator.training_loop._CLAIM_S,
    "the commit of a checkpoint": COMMIT_S,
    "Hugging Face folders": EXPORT_S,
    "leaving the mesh": rollmesh.learner.coordinator.coordinator._LEAVE_S,
    "the learner's end": LAST_S + _LEARNER_DRAIN_S,
    "the exit of its process": rollmesh.cli.app._EXIT_S,
    "an order of rank 0": rollmesh.learner.distributed.rank_group.KEEP_ALIVE_S,
    "reads its data": rollmesh.buffer.server.process._LOADING_S,
}


def _rows() -> list[list[str]]:
    table = PAGE.partition("## Every wait")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"][2:]


def _is_setting(name: str) -> bool:
    model: type[BaseModel] = Config
    for part in name.split("."):
        if part not in model.model_fields:
            return False
        kind = model.model_fields[part].annotation
        model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else BaseModel
    return True


def test_every_deadline_is_a_setting_or_a_constant() -> None:
    rows = _rows()
    assert len(rows) > 20
    settings = {name for row in rows for name in re.findall(r"`([a-z_]+\.[a-z_.]+)`", row[1])}
    assert [name for name in settings if not _is_setting(name)] == []
    for words, seconds in CONSTANTS.items():
        (row,) = [row for row in rows if words in row[0]]
        assert f"{seconds:g} s" in row[1]


def test_every_wait_has_a_deadline_and_an_end() -> None:
    for wait, deadline, says, end in _rows():
        assert wait and deadline and says and end  # noqa: PT018
        assert deadline != "-"


def test_what_takes_long_is_named_with_its_seconds() -> None:
    status = LearnerStatus(phase="checkpointing")
    anybody: Any = None
    monitor = MeshMonitor(anybody, anybody, status, anybody, anybody, batch=4)
    said = [monitor._phase_reason(now) for now in (100.0, 110.0, 112.0)]
    assert said == ["", "", "checkpointing for 12 s"]
    status.phase = "training"
    assert [monitor._phase_reason(now) for now in (113.0, 120.0)] == ["", ""]
    status.steps += 1
    assert monitor._phase_reason(125.0) == "", "each step again, however short the phases between are"
