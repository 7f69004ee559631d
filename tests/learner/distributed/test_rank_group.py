"""Execution of orders by ranks above 0."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgpack
import pytest

from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.coordinator.coordinator import Coordinator
from rollmesh.learner.distributed import rank_group
from rollmesh.learner.distributed.rank_group import KEEP_ALIVE_S, RankGroup, run_follower, wait_keeping_alive
from rollmesh.learner.liveness.rank_watch import RankId, RankWatch
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.config import load_config
from rollmesh.mesh.errors import ConfigError, UnreachableError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.trajectory.versions import PolicyVersion

WAIT = msgpack.packb({"order": "wait"})


class Orders:
    """Orders and answers of rank 0, one after the other."""

    def __init__(self, *orders: dict[str, Any] | bytes) -> None:
        self._orders = [order if isinstance(order, bytes) else msgpack.packb(order) for order in orders]

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


def test_a_rank_that_is_told_to_wait_for_the_claim_does() -> None:
    asked: list[str] = []

    def train(may_update: Callable[[], None]) -> None:
        may_update()
        asked.append("allowed")

    worker: Any = SimpleNamespace(train=train)
    link: Any = Orders({"order": "train"}, b"wait", b"wait", b"yes", {"order": "end"})
    run_follower(worker, link, RankWatch(None, RankId(1, 2), silent_s=1.0))
    assert asked == ["allowed"]


def test_rank_0_keeps_the_others_waiting_between_orders_and_amid_a_step() -> None:
    sent: list[bytes] = []
    # Each is done once the others have been told to wait.
    between, amid = Future[bool](), Future[bool]()
    waits = [between, amid]

    def send(order: bytes) -> None:
        sent.append(order)
        if order in (WAIT, b"wait"):
            waits.pop().set_result(True)

    channel: Any = SimpleNamespace(send=send, order_timeout_s=0.03)
    worker: Any = SimpleNamespace(train=lambda may_update: may_update(), memory=SimpleNamespace(require=lambda: None))
    ranks = RankGroup(worker, channel, RankWatch(None, RankId(0, 1), silent_s=1.0))
    ranks.train(lambda: wait_keeping_alive(ranks, amid, 600.0))
    assert wait_keeping_alive(ranks, between, 600.0)
    assert sent == [msgpack.packb({"order": "train"}), b"wait", b"yes", WAIT]


def test_a_wait_that_has_lasted_long_enough_ends() -> None:
    ranks: Any = SimpleNamespace(keep_alive=lambda: None, keep_alive_s=0.01)
    assert not wait_keeping_alive(ranks, Future(), 0.02)


@pytest.mark.parametrize(("order_timeout_s", "keep_alive_s"), [(1800.0, KEEP_ALIVE_S), (12.0, 4.0)])
def test_they_are_told_to_wait_before_they_give_up(order_timeout_s: float, keep_alive_s: float) -> None:
    anybody: Any = None
    channel: Any = SimpleNamespace(order_timeout_s=order_timeout_s)
    assert RankGroup(anybody, channel, anybody).keep_alive_s == keep_alive_s


def test_a_wait_for_orders_that_no_order_can_meet_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.distributed\.order_timeout_s"):
        load_config({"model": {"path": "m"}, "data": {"train": "t"}}, ["learner.distributed.order_timeout_s=4"])


class LastEvaluation:
    """The end of a coordinator's run, with an evaluation that ends once `answered` is set."""

    def __init__(self, ranks: Any) -> None:
        self.controls, self.answered, self.closed = ControlRequests(), threading.Event(), False
        self._bridge = AsyncBridge("test")
        self._coordinator: Any = SimpleNamespace(
            _bridge=self._bridge,
            _runtime=SimpleNamespace(ranks=ranks),
            _status=LearnerStatus(),
            _controls=self.controls,
        )

    def run(self) -> None:
        try:
            Coordinator._evaluate_last(self._coordinator, cast(Any, self), PolicyVersion(1, 4), "steps")
        finally:
            self._bridge.close()

    async def final_result(self, _policy: PolicyVersion) -> bool:
        while not self.answered.is_set():
            await asyncio.sleep(0.01)
        return True

    async def close(self) -> None:
        self.closed = True


def test_they_are_told_to_wait_as_long_as_the_last_evaluation_takes() -> None:
    ranks: Any = SimpleNamespace(keep_alive_s=0.01)
    evaluation = LastEvaluation(ranks)
    ranks.keep_alive = evaluation.answered.set
    evaluation.run()
    assert evaluation.answered.is_set()


def test_a_request_to_stop_from_before_the_last_evaluation_ends_it() -> None:
    evaluation = LastEvaluation(SimpleNamespace(keep_alive=lambda: None, keep_alive_s=0.01))
    evaluation.controls.stop("request")
    never = threading.Timer(600, evaluation.answered.set)
    never.start()
    evaluation.run()
    never.cancel()
    assert evaluation.closed
    assert not evaluation.answered.is_set()


def test_hugging_face_folders_that_no_disk_takes_do_not_keep_a_run_from_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, looks = threading.Event(), itertools.count()
    monkeypatch.setattr("rollmesh.learner.coordinator.coordinator.leave_hf_folders", lambda _config: disk.wait())
    # Minutes pass from one look at the clock to the next.
    monkeypatch.setattr(rank_group, "time", SimpleNamespace(monotonic=lambda: 300.0 * next(looks)))
    ranks = Mock(keep_alive_s=0.01)
    coordinator: Any = SimpleNamespace(
        _runtime=SimpleNamespace(ranks=ranks), _status=LearnerStatus(), _config=SimpleNamespace()
    )
    coordinator._wait_for = partial(Coordinator._wait_for, coordinator)
    Coordinator._leave_hf_folders(coordinator)
    disk.set()
    assert ranks.keep_alive.called
    assert "`rollmesh export` writes them later" in caplog.text
