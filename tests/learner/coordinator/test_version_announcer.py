"""The order of publication and announcement, and what becomes of failures in the background."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.coordinator.run_progress import RunProgress
from rollmesh.learner.coordinator.version_announcer import AnnouncementRules, VersionAnnouncer
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.config import load_config
from rollmesh.mesh.errors import RollmeshError, WeightsError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.trajectory.versions import PolicyVersion


@pytest.mark.parametrize("evaluated", [[], [4], [2, 4], [6], [2, 6]])
def test_the_version_from_which_a_run_continues_is_evaluated_once(evaluated: list[int]) -> None:
    config = load_config({"model": {"path": "m"}, "data": {"train": "t", "eval": "e"}}, ["eval.every_steps=2"])
    progress = RunProgress.resume({}, 2, 6)
    progress.totals.evals = [{"version": version, "reward": 0.5} for version in evaluated]
    rules = AnnouncementRules.of(config, progress, 30)
    assert rules.evaluates(6) == (6 not in evaluated)
    assert not rules.evaluates(7)
    assert rules.evaluates(8)


class Scene:
    """An announcer whose ranks publish when the test says so."""

    def __init__(self) -> None:
        self.bridge = AsyncBridge("test")
        self.controls = ControlRequests()
        self.status = LearnerStatus()
        self.exported: list[tuple[PolicyVersion, Future[Any]]] = []
        self.republished: list[PolicyVersion] = []
        self.announced: list[int] = []
        ranks = SimpleNamespace(export=self._export, keep_alive_s=0.01, keep_alive=self._keep_alive)
        self.kept_alive = threading.Event()
        runtime = SimpleNamespace(bridge=self.bridge, ranks=ranks, controls=self.controls, status=self.status)
        self.committed: list[tuple[int, str]] = []
        client = SimpleNamespace(set_policy_version=self._set_policy_version, commit=self._commit)
        publisher = SimpleNamespace(republish=self.republished.append)
        rules = AnnouncementRules(3, commit_each=False, timeout_s=30, evaluate_first=None, evaluate_every=None)
        self.announcer = VersionAnnouncer(runtime, client, publisher, None, rules)  # type: ignore[arg-type]  # their used parts

    def _export(self, _publisher: object, policy: PolicyVersion) -> Future[Any]:
        published: Future[Any] = Future()
        self.exported.append((policy, published))
        return published

    def _keep_alive(self) -> None:
        self.kept_alive.set()

    async def _set_policy_version(self, incarnation: int, version: int) -> None:
        assert incarnation == 3
        self.announced.append(version)

    async def _commit(self, _table: str, _incarnation: int, version: int, *, checkpoint: str) -> None:
        self.committed.append((version, checkpoint))


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.bridge.close()


def test_a_version_is_announced_once_it_can_be_fetched_and_none_overtakes_another(scene: Scene) -> None:
    announcer = scene.announcer
    announcer.publish(0, changed=True)
    in_force = scene.bridge.submit(announcer.in_force())
    scene.bridge.call(asyncio.sleep(0.01), 10)
    assert (scene.announced, scene.status.published, in_force.done()) == ([], None, False)
    scene.exported[0][1].set_result(None)
    # Waits for the version before.
    announcer.publish(1, changed=True)
    in_force.result(60)
    assert scene.announced == [0]
    assert scene.status.published == PolicyVersion(3, 0)
    scene.exported[1][1].set_result(None)
    announcer.wait_in_force()
    assert scene.announced == [0, 1]


def test_the_other_ranks_are_told_to_wait_for_a_slow_publication(scene: Scene) -> None:
    scene.announcer.publish(0, changed=True)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(scene.announcer.wait_in_force)
        told = scene.kept_alive.wait(60)
        scene.exported[0][1].set_result(None)
        waiting.result(60)
    assert told


def test_a_checkpoint_is_committed_once_its_own_version_is_in_force_whatever_is_published_later(scene: Scene) -> None:
    """A slow `weights.dir` takes longer than a commit may."""
    scene.announcer.publish(0, changed=True)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(scene.announcer.wait_announced, 0)
        scene.bridge.call(asyncio.sleep(0.01), 10)
        assert not waiting.done()
        scene.exported[0][1].set_result(None)
        waiting.result(60)
    assert scene.announced == [0]
    scene.announcer.publish(1, changed=True)
    scene.announcer.wait_announced(0)
    scene.bridge.call(scene.announcer.commit_checkpoint(0, "folder"), 10)
    assert (scene.announced, scene.committed) == ([0], [(0, "folder")])
    scene.exported[1][1].set_exception(WeightsError("no memory"))
    scene.announcer.wait_announced(1)


def test_weights_that_have_not_changed_are_not_exported(scene: Scene) -> None:
    scene.announcer.publish(0, changed=True)
    scene.exported[0][1].set_result(None)
    for version in (1, 2):
        scene.announcer.publish(version, changed=False)
    scene.announcer.wait_in_force()
    assert scene.republished == [PolicyVersion(3, 1), PolicyVersion(3, 2)]
    assert scene.announced == [0, 1, 2]
    assert len(scene.exported) == 1


def test_a_publication_that_fails_ends_the_run_by_its_error_and_is_not_announced(scene: Scene) -> None:
    scene.announcer.publish(0, changed=True)
    in_force = scene.bridge.submit(scene.announcer.in_force())
    scene.exported[0][1].set_exception(WeightsError("no memory"))
    for told in (
        lambda: in_force.result(60),
        scene.announcer.wait_in_force,
        lambda: scene.announcer.publish(1, changed=True),
        scene.controls.raise_failure,
    ):
        with pytest.raises(WeightsError, match="no memory"):
            told()
    assert not scene.announced
    assert scene.status.published is None


def test_a_rank_that_is_lost_in_the_background_ends_the_wait_for_groups_alone(scene: Scene) -> None:
    woken = threading.Event()
    scene.controls.wake = woken.set
    scene.announcer.publish(0, changed=True)
    scene.exported[0][1].set_exception(RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer"))
    assert woken.wait(60)
    with pytest.raises(RuntimeError, match="gloo"):
        scene.announcer.wait_in_force()
    # The watch of the ranks names the one that was lost.
    scene.controls.raise_failure()


def test_a_fault_in_the_background_ends_the_run(scene: Scene) -> None:
    woken = threading.Event()
    scene.controls.wake = woken.set
    scene.announcer.publish(0, changed=True)
    scene.exported[0][1].set_exception(OSError("no such folder"))
    assert woken.wait(60)
    with pytest.raises(RollmeshError, match="the publication of the weights failed: OSError: no such folder"):
        scene.controls.raise_failure()


def test_a_run_that_ends_gives_up_its_publication_without_a_word(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Its channel closes next, and that would look like a fault of the publication."""
    scene.announcer.close()
    scene.announcer.publish(0, changed=True)
    in_force = scene.bridge.submit(scene.announcer.in_force())
    scene.announcer.close()
    with pytest.raises(CancelledError):
        in_force.result(60)
    scene.controls.raise_failure()
    assert (scene.announced, caplog.records) == ([], [])
