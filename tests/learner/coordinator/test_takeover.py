"""A learner commits the last checkpoint of the one before it, where the buffer does not know it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rollmesh.learner.coordinator.mesh_session import MeshSession
from rollmesh.learner.coordinator.takeover import RunTakeover
from rollmesh.learner.runtime import LearnerRuntime
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.config import Config
from rollmesh.protos import buffer_pb2
from tests.learner.recovery.test_redis_recovery import write_checkpoint, write_log
from tests.traced import RUN, KeptSpans


async def _answer(value: object) -> object:
    return value


def _call(coroutine: Coroutine[Any, Any, object], _most_s: float) -> object:
    return asyncio.run(cast(Coroutine[Any, Any, object], coroutine))


def test_trajectories_of_an_earlier_learner_end_with_the_commit_of_this_one(tmp_path: Path) -> None:
    folder = tmp_path / RUN
    folder.mkdir()
    uses = [(1, version, 0, [f"train-{version + 1}"]) for version in range(4)]
    write_log(folder, uses)
    checkpoint = str(write_checkpoint(folder, 1, 3, [[1, 0]]).resolve())
    kept, commits = KeptSpans(), []

    def commit(*arguments: object, checkpoint: str) -> Coroutine[Any, Any, object]:
        commits.append((*arguments, checkpoint))
        return _answer(None)

    described = buffer_pb2.DescribeResponse(policy={"incarnation": 1, "version": 3}, committed_version=1)
    session = SimpleNamespace(
        monitor=SimpleNamespace(refresh=lambda: _answer(described)),
        client=SimpleNamespace(commit=commit),
        take_over=lambda *_, **__: _answer((2, 9)),
        tracer=kept.tracer,
    )
    extra = {"version": 3, "lineage": [[1, 0]]}
    ranks = SimpleNamespace(load=lambda _: extra)
    runtime = SimpleNamespace(bridge=SimpleNamespace(call=_call), ranks=ranks, status=LearnerStatus())
    config = Config.model_validate(
        {"run": {"dir": str(tmp_path), "name": RUN}, "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    )
    taker = RunTakeover(config, cast(MeshSession, session), cast(LearnerRuntime, runtime), patience_s=1.0)
    assert taker.take_over(None, takeover=False).progress.incarnation == 2
    assert commits == [("train", 1, 3, checkpoint)]
    ended = {f"train-{n}": kept.of(f"train-{n}", 1).keys() for n in range(1, 5)}
    both = {"commit", "trajectory"}
    assert ended == {"train-1": set(), "train-2": both, "train-3": both, "train-4": set()}
    spans = kept.of("train-2", 0)
    assert spans["trajectory"][0].attributes["fate"] == "trained"
    assert spans["commit"][0].attributes == {"incarnation": 1, "train_version": 1, "committed_version": 3}
