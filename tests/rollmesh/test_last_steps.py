"""Steps since the launcher's last look at a run are shown, however soon the run ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollmesh.launcher import local
from rollmesh.launcher.console.view import SilentView
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.launcher.placement.devices import DevicePlan
from rollmesh.launcher.placement.preparation import Preparation
from rollmesh.launcher.run_secrets import make_secrets
from rollmesh.mesh.config import load_config
from rollmesh.report.metrics import Record


class Shown(SilentView):
    """Keeps the steps, and says when the mesh has been looked at."""

    def __init__(self) -> None:
        self.looked = asyncio.Event()
        self.steps: list[int] = []
        self.events: list[str] = []

    def event(self, text: str) -> None:
        self.events.append(text)

    def update(self, snapshot: Snapshot, records: Sequence[Record]) -> None:
        self.steps += [record["step"] for record in records]
        self.looked.set()


async def test_the_last_steps_are_shown_once_the_mesh_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(
        {"run": {"name": "run", "dir": str(tmp_path)}, "model": {"path": "a/model"}, "data": {"train": "t.jsonl"}}
    )
    config.run.folder.mkdir()
    make_secrets(config.run.folder)
    view = Shown()
    run = local.LocalRun(config, view, Preparation(DevicePlan()))
    monkeypatch.setattr(local, "_LOOK_EVERY_S", 3600.0)
    # Nothing listens there, as once the buffer has ended.
    monkeypatch.setattr(run, "_mesh_address", lambda: "127.0.0.1:9")
    run._announced.set()
    watching = asyncio.create_task(run._watch())
    looked = asyncio.create_task(view.looked.wait())
    await asyncio.wait({looked, watching}, return_when=asyncio.FIRST_COMPLETED)
    assert looked.done(), watching
    records = [{"step": 1}, {"step": 2, "mismatch_warning": "they differ"}]
    (config.run.folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert view.steps == [1, 2]
    assert [event for event in view.events if "differ" in event] == ["they differ"]
