"""A recorded run, trained on again alone: the same metrics; with another setting, others."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from rollmesh.cli.app import app
from rollmesh.learner.coordinator.replay import replay
from rollmesh.learner.recording.compare import ComparedStep, compare
from rollmesh.learner.recording.recording import _HEADER, FOLDER, MAGIC, BatchRecorder, Recording, _frames
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.lineage import Lineage
from rollmesh.protos import buffer_pb2, trajectory_pb2
from tests.learner.live.tiny import make_config, mesh_of, run_learner

STEPS = 5


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """A finished run that has recorded its stage, with a checkpoint of version 2 and of the end."""
    folder = tmp_path_factory.mktemp("recorded")
    config = make_config(
        folder,
        {
            "learner.steps": STEPS, "logging.record": True, "checkpoint.every_steps": 2, "checkpoint.keep": 9,
            "buffer.max_staleness": 2, "algorithm": {"name": "dapo"}, "learner.deterministic": True,
        },
    )  # fmt: skip
    threads = torch.get_num_threads()
    with mesh_of(config) as mesh:
        assert run_learner(config, mesh) == 0
    yield config
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def compared(config: Config, out: Path) -> list[ComparedStep]:
    return list(compare(config.run.folder / "metrics.jsonl", out / "metrics.jsonl", tolerance=0.0))


def differing(steps: Sequence[ComparedStep]) -> dict[int, list[str]]:
    return {step.version: [d.name for d in step.differences] for step in steps if step.differences}


def test_a_replay_repeats_every_metric_of_the_run(recorded: Config, tmp_path: Path) -> None:
    done = replay(recorded, recorded.run.folder, tmp_path / "again")
    assert done is not None
    assert (done.first, done.last, done.reason) == (0, STEPS, "steps")
    steps = compared(recorded, done.folder)
    assert [step.version for step in steps] == list(range(1, STEPS + 1))
    assert min(step.metrics for step in steps) > 30
    assert {"actor/loss", "actor/grad_norm", "staleness/mean"} <= steps[-1].replayed.keys()
    assert differing(steps) == {}


def test_a_replay_goes_on_from_a_checkpoint(recorded: Config, tmp_path: Path) -> None:
    (checkpoint,) = (recorded.run.folder / "checkpoints").glob("*2")
    done = replay(recorded, recorded.run.folder, tmp_path / "later", checkpoint=checkpoint)
    assert done is not None
    assert (done.first, done.last) == (2, STEPS)
    steps = compared(recorded, done.folder)
    assert [step.version for step in steps] == [3, 4, STEPS]
    assert differing(steps) == {}
    assert tensors_at_the_end(done.folder) == tensors_at_the_end(recorded.run.folder)


def tensors_at_the_end(run: Path) -> str:
    """The digest of weights, moments and random state."""
    (last,) = (run / "checkpoints").glob(f"*{STEPS}")
    digests: dict[str, str] = json.loads((last / "digests.json").read_text())
    return digests["__0_0.distcp"]


def test_another_setting_trains_otherwise_on_the_same_data(recorded: Config, tmp_path: Path) -> None:
    other = load_config(recorded.model_dump(), ["learner.optimizer.lr=0.02"])
    done = replay(other, recorded.run.folder, tmp_path / "other", steps=2)
    assert done is not None
    first, second = compared(recorded, done.folder)
    assert {d.name for d in first.differences} >= {"actor/lr"}
    assert "actor/loss" not in {d.name for d in first.differences}, "the first step sees the same weights"
    assert "actor/loss" in {d.name for d in second.differences}
    assert first.recorded["critic/score/mean"] == first.replayed["critic/score/mean"]


def test_the_command_replays_and_compares(recorded: Config, tmp_path: Path) -> None:
    def command(*arguments: str) -> Result:
        root = logging.getLogger()
        before = root.handlers[:]
        try:
            return CliRunner().invoke(app, ["replay", str(recorded.run.folder), *arguments])
        finally:
            root.handlers[:] = before

    same = command("--out", str(tmp_path / "same"), "--compare", "--steps", "2")
    assert same.exit_code == 0, same.output
    assert "version 2: equal (critic/score/mean " in same.output
    other = command("--out", str(tmp_path / "other"), "--compare", "--steps", "2", "--learner.optimizer.lr=0.02")
    assert other.exit_code == 1, other.output
    assert "actor/lr: 0.01 -> 0.02" in other.output


def test_a_start_that_is_not_recorded_is_refused(recorded: Config, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no batch is recorded"):
        replay(recorded, tmp_path, tmp_path / "out")
    last = max((recorded.run.folder / "checkpoints").iterdir())
    with pytest.raises(DataError, match=f"no batch of version {STEPS}"):
        replay(recorded, recorded.run.folder, tmp_path / "out", checkpoint=last)
    with pytest.raises(DataError, match="is no checkpoint") as error:
        replay(recorded, recorded.run.folder, tmp_path / "out", checkpoint=last.parent)
    assert last.name in error.value.hint
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(DataError, match="not empty"):
        replay(recorded, recorded.run.folder, tmp_path / "mine")


def test_a_gap_ends_the_replay_and_a_batch_without_groups_is_said(
    recorded: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    holes = tmp_path / FOLDER / "000001-000000.batches"
    holes.parent.mkdir()
    (path,) = (recorded.run.folder / FOLDER).glob("*.batches")
    frames = [
        (path.read_bytes()[place.start - _HEADER.size : place.start + place.length]) for _, place in _frames(path)
    ]
    holes.write_bytes(MAGIC + b"".join(frame for version, frame in enumerate(frames) if version != 2))
    done = replay(recorded, tmp_path, tmp_path / "out")
    assert done is not None
    assert (done.last, done.reason) == (2, "end_of_data")
    assert "batch of version 2 was not recorded" in caplog.text
    strict = load_config(recorded.model_dump(), ["algorithm.filter.accuracy_low=0.99"])
    with pytest.raises(DataError, match="drops every group of version 0"):
        replay(strict, recorded.run.folder, tmp_path / "strict")


class Stored:
    """Payloads that the buffer still has."""

    async def fetch(self, table: str, refs: Sequence[buffer_pb2.MemberRef]) -> Any:
        for ref in refs:
            yield f"{table} {ref.group_id} {ref.member}".encode()


def batch(count: int) -> list[SampledGroup]:
    """Groups whose payloads are fetched by the ranks that train them."""
    found = []
    for index in range(count):
        leased = buffer_pb2.LeasedGroup(group_id=f"g{index}")
        for member in range(2):
            leased.members.add(member=member, outcome=trajectory_pb2.OUTCOME_SCORED)
        found.append(SampledGroup.of(leased, np.zeros(1, np.int32)))
    return found


async def record(folder: Path, resumed: Sequence[tuple[int, int]], versions: range, max_bytes: int = 1 << 30) -> None:
    recorder = BatchRecorder(folder, Stored(), Lineage(tuple(resumed)), max_bytes=max_bytes)
    for version in versions:
        await recorder.record(version, batch(2), {"zero_variance": version})
    await recorder.close()


async def test_a_later_learner_replaces_what_it_discarded(tmp_path: Path) -> None:
    await record(tmp_path, [(1, 0)], range(5))
    await record(tmp_path, [(1, 0), (2, 3)], range(3, 4))
    recording = Recording(tmp_path)
    assert recording.versions == [0, 1, 2, 3]
    assert recording.lineage == Lineage(((1, 0), (2, 3)))
    found = [recording.batch(version) for version in recording.versions]
    assert [batch.incarnation for batch in found if batch] == [1, 1, 1, 2]
    last = found[-1]
    assert last is not None
    assert dict(last.dropped) == {"zero_variance": 3}
    assert list(last.payloads[2:]) == [b"train g1 0", b"train g1 1"]


async def test_a_torn_end_is_left_out_and_damage_is_said(tmp_path: Path) -> None:
    await record(tmp_path, [(1, 0)], range(3))
    (path,) = tmp_path.glob("*.batches")
    whole = path.read_bytes()
    for length in range(len(MAGIC), len(whole), 7):
        path.write_bytes(whole[:length])
        versions = Recording(tmp_path).versions if length > len(whole) // 2 else []
        assert list(versions) == list(range(len(versions)))
    path.write_bytes(whole[:-1])
    assert Recording(tmp_path).versions == [0, 1]
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match="damaged"):
        Recording(tmp_path).batch(2)


async def test_the_files_stay_below_their_bound_and_keep_the_latest(tmp_path: Path) -> None:
    limit = 4000
    await record(tmp_path, [(1, 0)], range(100), max_bytes=limit)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit
    kept = Recording(tmp_path).versions
    assert len(kept) > 5
    assert list(kept) == list(range(100 - len(kept), 100))


async def test_a_disk_that_refuses_ends_the_recording_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    await record(tmp_path / "file" / "below", [(1, 0)], range(3))
    assert caplog.text.count("recording ends before version 0") == 1
