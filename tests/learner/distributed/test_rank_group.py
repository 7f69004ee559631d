"""Execution of orders by ranks above 0."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.coordinator.coordinator import Coordinator
from rollmesh.learner.distributed.rank_group import TURN_S, RankGroup, run_follower
from rollmesh.learner.liveness.rank_watch import RankId, RankWatch
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.config import load_config
from rollmesh.mesh.errors import ConfigError, UnreachableError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.trajectory.versions import PolicyVersion


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

    def begin_checkpoint(self, version: object, _extra: object) -> None:
        self.saved.append(str(version))


def test_a_rank_without_its_share_still_takes_part_in_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.learner.distributed.rank_group.TrainPlan.from_bytes", lambda plan: plan)
    prepare, save = {"order": "prepare", "plan": b""}, {"order": "checkpoint", "version": "1:4", "extra": {}}
    worker: Any = Away()
    link: Any = Orders(prepare, save, {"order": "end"})
    run_follower(worker, link, RankWatch(None, RankId(1, 2), silent_s=1.0))
    assert worker.saved == ["1:4"]


@pytest.mark.parametrize(("order_timeout_s", "turn_s"), [(1800.0, TURN_S), (12.0, 4.0)])
def test_they_are_told_to_wait_before_they_give_up(order_timeout_s: float, turn_s: float) -> None:
    anybody: Any = None
    channel: Any = SimpleNamespace(order_timeout_s=order_timeout_s)
    assert RankGroup(anybody, channel, anybody).turn_s == turn_s


def test_a_wait_for_orders_that_no_order_can_meet_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.distributed\.order_timeout_s"):
        load_config({"model": {"path": "m"}, "data": {"train": "t"}}, ["learner.distributed.order_timeout_s=4"])


def test_they_are_told_to_wait_as_long_as_the_last_evaluation_takes() -> None:
    told = threading.Event()

    async def final_result(_policy: PolicyVersion) -> bool:
        return await asyncio.to_thread(told.wait, 30)

    bridge, ranks = AsyncBridge("test"), SimpleNamespace(keep_alive=told.set, turn_s=0.01)
    coordinator: Any = SimpleNamespace(
        _bridge=bridge,
        _runtime=SimpleNamespace(ranks=ranks),
        _status=LearnerStatus(),
        _controls=ControlRequests(),
    )
    evaluator: Any = SimpleNamespace(final_result=final_result)
    Coordinator._evaluate_last(coordinator, evaluator, PolicyVersion(1, 4), "steps")
    bridge.close()
    assert told.is_set()
