"""When a checkpoint is begun, what waits for it, and what becomes of one that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollmesh.learner.checkpoint.names import checkpoint_name, list_checkpoints
from rollmesh.learner.checkpoint.store import UnwrittenCheckpointError
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.coordinator.checkpoint_scheduler import MAX_FAILED, CheckpointScheduler
from rollmesh.learner.coordinator.run_progress import RunProgress
from rollmesh.learner.placement.turns import OwnDevices
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.config.evaluation import CheckpointSection
from rollmesh.mesh.errors import FencedError, UnreachableError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.trajectory.versions import PolicyVersion

_S = 30.0
MakeRun = Callable[..., "Run"]


class Run:
    """A scheduler over ranks and a buffer that answer when they are told to."""

    def __init__(self, root: Path, bridge: AsyncBridge, **section: Any) -> None:
        self.root, self.bridge = root, bridge
        self.begun: list[tuple[int, Future[Path]]] = []
        self.committed: list[int] = []
        self.told: list[int] = []
        self.evaluated: set[int] = set()
        self.woken = threading.Event()
        self.refusal: Exception | None = None
        self.controls = ControlRequests()
        self.controls.wake = self.woken.set
        ranks = SimpleNamespace(begin_checkpoint=self._begin, keep_alive=self._nothing, keep_alive_s=_S)
        runtime: Any = SimpleNamespace(bridge=bridge, ranks=ranks, controls=self.controls, status=LearnerStatus())
        self.commit_waits, self.announced = threading.Event(), threading.Event()
        self.announced.set()
        announcer: Any = SimpleNamespace(
            commit_checkpoint=self._commit,
            is_evaluated=self.evaluated.__contains__,
            wait_announced=self._wait_announced,
        )
        best: Any = SimpleNamespace(checkpoint_written=lambda policy, _: self.told.append(policy.version))
        keys = {"every_s": None, "keep": 9, **section}
        progress = RunProgress.resume({}, 1, 0)
        self.copies: Any = SimpleNamespace(uploading=None, start=self._nothing, failed=0)
        self.scheduler = CheckpointScheduler(
            runtime, CheckpointSection(**keys), progress, announcer, best, OwnDevices(), self.copies
        )

    def _nothing(self) -> None:
        """Nothing waits."""

    def _begin(self, policy: PolicyVersion, _extra: object) -> Future[Path]:
        files: Future[Path] = Future()
        self.begun.append((policy.version, files))
        return files

    def _wait_announced(self, _version: int) -> None:
        self.commit_waits.set()
        assert self.announced.wait(_S)

    async def _commit(self, version: int, _folder: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.committed.append(version)

    def finish(self, error: Exception | None = None) -> None:
        """The files of the checkpoint that was begun last are whole, or refused; returns after its commit."""
        version, files = self.begun[-1]
        self.woken.clear()
        if error is not None:
            files.set_exception(error)
        else:
            folder = self.root / checkpoint_name(PolicyVersion(1, version))
            folder.mkdir(parents=True)
            files.set_result(folder)
        assert self.woken.wait(_S)

    def finish_later(self) -> threading.Thread:
        thread = threading.Thread(target=self.finish)
        thread.start()
        return thread

    def close_before_commit(self) -> None:
        """The learner ends while a whole checkpoint waits for its version to be announced."""
        writing = self.finish_later()
        assert self.commit_waits.wait(_S)
        self.scheduler.close()
        self.announced.set()
        writing.join()

    @property
    def versions(self) -> list[int]:
        return [version for version, _ in self.begun]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    bridge, runs = AsyncBridge("test"), []

    def make(**section: Any) -> Run:
        runs.append(Run(tmp_path, bridge, **section))
        return runs[-1]

    yield make
    for run in runs:
        run.scheduler.close()
        for _, files in run.begun:
            if not files.done():
                files.cancel()
    bridge.close()


def test_training_goes_on_while_one_is_written_and_the_next_one_due_by_time_follows_it(make_run: MakeRun) -> None:
    run = make_run(every_s=1e-9)
    for version in (1, 2, 3):
        run.scheduler.write_if_due(version, healthy=True)
    assert run.versions == [1], "one at a time"
    assert run.committed == []
    run.finish()
    assert run.committed == [1], "while version 3 is trained"
    run.scheduler.write_if_due(4, healthy=False)
    run.scheduler.write_if_due(5, healthy=True)
    assert run.versions == [1, 5], "weights that could not be trained are not worth one"
    assert run.scheduler.metrics()["checkpoint/write_s"] > 0


@pytest.mark.parametrize("why", ["evaluated", "every_steps"])
def test_a_step_that_was_named_is_kept_whatever_is_being_written(make_run: MakeRun, why: str) -> None:
    run = make_run(every_steps=1 if why == "every_steps" else None)
    run.evaluated.update({1, 2} if why == "evaluated" else set())
    run.scheduler.write_if_due(1, healthy=True)
    writing = run.finish_later()
    run.scheduler.write_if_due(2, healthy=True)
    writing.join()
    assert run.versions == [1, 2]
    assert run.told == ([1] if why == "evaluated" else [])


def test_requests_are_answered_with_the_version_after_them(make_run: MakeRun) -> None:
    run = make_run()
    first, gone = run.controls.request_checkpoint(), run.controls.request_checkpoint()
    # Its caller's deadline has passed.
    assert gone.cancel()
    run.scheduler.serve_requests(1)
    second = run.controls.request_checkpoint()
    run.scheduler.serve_requests(2)
    assert run.versions == [1]
    run.finish()
    assert first.result(_S)[1] == 1
    assert not second.done(), "asked for when version 1 had been copied"
    run.scheduler.serve_requests(3)
    third = run.controls.request_checkpoint()
    run.scheduler.serve_requests(3)
    run.finish()
    assert second.result(_S) == third.result(_S) == (run.begun[-1][1].result(), 3)
    fourth = run.controls.request_checkpoint()
    run.scheduler.serve_requests(3)
    assert fourth.result(_S)[1] == 3, "it is there"
    assert run.versions == [1, 3]


def test_the_buffers_request_is_served_without_a_step(make_run: MakeRun) -> None:
    """It holds generators back until used groups are committed: there may be no further step before."""
    run = make_run()
    run.scheduler.request()
    run.scheduler.write_if_due(1, healthy=False)
    run.scheduler.request()
    run.scheduler.write_if_due(2, healthy=True)
    run.finish()
    run.scheduler.serve_requests(2)
    assert run.versions == [1, 2]


def test_a_disk_that_refuses_costs_that_checkpoint_and_the_third_time_the_run(
    make_run: MakeRun, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(every_steps=2)
    full = UnwrittenCheckpointError("cannot write checkpoint: No space left on device")
    asked = run.controls.request_checkpoint()
    run.scheduler.serve_requests(1)
    run.finish(full)
    with pytest.raises(UnwrittenCheckpointError):
        asked.result(_S)
    run.scheduler.write_if_due(3, healthy=True)
    run.finish()
    for failures in range(MAX_FAILED):
        run.scheduler.write_if_due(5 + 2 * failures, healthy=True)
        run.finish(full)
    with pytest.raises(UnwrittenCheckpointError):
        run.scheduler.write_if_due(11, healthy=True)
    assert run.versions == [1, 3, 5, 7, 9]
    assert run.committed == [3]
    assert run.scheduler.metrics()["checkpoint/failed"] == 1 + MAX_FAILED
    assert caplog.text.count("No space left") == MAX_FAILED


def test_the_end_waits_for_the_last_and_says_why_there_is_none(make_run: MakeRun) -> None:
    run = make_run(every_steps=1)
    run.scheduler.write_if_due(1, healthy=True)
    writing = run.finish_later()
    begin, full = run._begin, UnwrittenCheckpointError("cannot write checkpoint")

    def refused(policy: PolicyVersion, extra: object) -> Future[Path]:
        files = begin(policy, extra)
        files.set_exception(full)
        return files

    run.scheduler._ranks.begin_checkpoint = refused  # type: ignore[method-assign]
    with pytest.raises(UnwrittenCheckpointError):
        run.scheduler.write(2)
    writing.join()
    assert (run.versions, run.committed) == ([1, 2], [1])


def test_who_was_taken_over_hears_it_in_the_training_thread_and_removes_nothing(make_run: MakeRun) -> None:
    run = make_run(every_steps=1, keep=1)
    run.scheduler.write_if_due(1, healthy=True)
    run.finish()
    run.scheduler.write_if_due(2, healthy=True)
    run.refusal = FencedError("incarnation 2 has taken over")
    run.finish()
    with pytest.raises(FencedError):
        run.scheduler.serve_requests(2)
    assert [version.version for version, _ in list_checkpoints(run.root)] == [1, 2]


def test_a_commit_waits_for_its_version_and_is_left_out_where_the_learner_ends_meanwhile(make_run: MakeRun) -> None:
    run = make_run(every_steps=1)
    run.announced.clear()
    run.scheduler.write_if_due(1, healthy=True)
    run.close_before_commit()
    assert run.committed == []


def test_the_checkpoint_that_is_being_copied_elsewhere_is_not_removed(make_run: MakeRun) -> None:
    run = make_run(every_steps=1, keep=1)
    run.copies.uploading = checkpoint_name(PolicyVersion(1, 1))
    for version in (1, 2, 3):
        run.scheduler.write_if_due(version, healthy=True)
        run.finish()
    assert [version.version for version, _ in list_checkpoints(run.root)] == [1, 3]


def test_the_wait_for_copies_says_where_they_go_and_until_when(make_run: MakeRun) -> None:
    run = make_run(every_steps=1)
    run.scheduler.write_if_due(1, healthy=True)
    run.finish()
    run.scheduler.write(1)
    copied: Future[None] = Future()
    asked = threading.Event()

    def start() -> Future[None]:
        asked.set()
        return copied

    run.copies.start, run.copies.url = start, "s3://bucket/run"
    waiting = threading.Thread(target=run.scheduler.wait_for_copies)
    waiting.start()
    assert asked.wait(_S)
    status = run.scheduler._status
    said = status.waiting_reason
    copied.set_result(None)
    waiting.join()
    assert said.startswith("copies checkpoints to s3://bucket/run since ")
    assert said.endswith(" at most")
    assert status.waiting_reason == ""


def test_without_a_mesh_the_disk_has_the_last_step(make_run: MakeRun) -> None:
    run = make_run(every_steps=1)
    run.scheduler.write_if_due(1, healthy=True)
    began = threading.Event()
    begin = run._begin

    def told(policy: PolicyVersion, extra: object) -> Future[Path]:
        files = begin(policy, extra)
        began.set()
        return files

    run.scheduler._ranks.begin_checkpoint = told  # type: ignore[method-assign]

    def answer() -> None:
        assert run.scheduler._ending.wait(_S)
        run.finish()
        assert began.wait(_S)
        run.begun[-1][1].set_result(run.root / checkpoint_name(PolicyVersion(1, 2)))

    disk = threading.Thread(target=answer)
    disk.start()
    left = run.scheduler.write_uncommitted(2, at_step_boundary=True)
    disk.join()
    assert left == "the next start continues from i0001-v00000002"
    assert run.committed == []


def test_a_checkpoint_that_takes_much_of_the_interval_is_told_of(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr("rollmesh.learner.coordinator.checkpoint_scheduler.time", clock)
    run = make_run(every_s=600.0)
    for due, took_s in ((600.0, 150.0), (1200.0, 250.0)):
        clock.now = due
        run.scheduler.write_if_due(int(due), healthy=True)
        clock.now += took_s
        run.finish()
    assert "one is due every" not in caplog.text, "a step is being trained"
    clock.now = 1800.0
    run.scheduler.write_if_due(1800, healthy=True)
    assert run.scheduler.metrics()["checkpoint/write_s"] == 250.0, "until its commit, not until the end of a step"
    assert [record.getMessage() for record in caplog.records if "one is due" in record.getMessage()] == [
        "a checkpoint takes 250 s to be written, and one is due every 600 s: steps are slower meanwhile. Set "
        "checkpoint.every_s to 3000 or more, raise eval.every_steps where evaluations ask for checkpoints, or give "
        "run.dir a faster disk"
    ]


def test_a_requested_checkpoint_is_not_told_of_after_one_of_the_schedule(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0.0)
    monkeypatch.setattr("rollmesh.learner.coordinator.checkpoint_scheduler.time", clock)
    run = make_run(every_s=600.0)

    def finish(took_s: float) -> None:
        clock.now += took_s
        run.finish()
        run.scheduler.serve_requests(int(clock.now))

    clock.now = 600.0
    run.scheduler.write_if_due(600, healthy=True)
    finish(20.0)
    run.controls.request_checkpoint()
    run.scheduler.serve_requests(620)
    finish(300.0)
    assert run.committed == [600, 620]
    assert "one is due every" not in caplog.text
    clock.now = 1300.0
    run.scheduler.write_if_due(1300, healthy=True)
    finish(250.0)
    assert "a checkpoint takes 250 s to be written, and one is due every 700 s" in caplog.text, (
        "the one warning is left"
    )


def test_a_request_is_not_answered_with_a_checkpoint_that_was_not_committed(make_run: MakeRun) -> None:
    run = make_run()
    run.announced.clear()
    asked = run.controls.request_checkpoint()
    run.scheduler.serve_requests(1)
    run.close_before_commit()
    assert run.committed == []
    with pytest.raises(UnreachableError, match="was not committed"):
        asked.result(_S)
