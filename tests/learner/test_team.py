"""What ranks above 0 do with their orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest

from learner.team import follow
from mesh.errors import UnreachableError


class Orders:
    """Orders of rank 0, one after the other."""

    def __init__(self, *orders: dict[str, Any]) -> None:
        self._orders = [msgpack.packb(order) for order in orders]

    def receive(self) -> bytes:
        return self._orders.pop(0)


class Away:
    """A worker that cannot get its share."""

    def __init__(self) -> None:
        self.saved: list[str] = []

    def prepare(self, _plan: object) -> None:
        raise UnreachableError("the mesh is away")

    def save(self, version: object, _extra: object) -> Path:
        self.saved.append(str(version))
        return Path()


def test_a_rank_without_its_share_still_takes_part_in_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.team.TrainPlan.from_bytes", lambda plan: plan)
    prepare, save = {"order": "prepare", "plan": b""}, {"order": "save", "version": "1:4", "extra": {}}
    worker: Any = Away()
    link: Any = Orders(prepare, save, {"order": "end"})
    follow(worker, link)
    assert worker.saved == ["1:4"]
