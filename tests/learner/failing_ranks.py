"""Scenes of two ranks where one of them fails, or cannot read its share; called on both by `tests.learner.dataflow`."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rollmesh.learner.checkpoint.store import CheckpointStore
from rollmesh.learner.distributed.rank_channel import RankChannel
from rollmesh.learner.distributed.rank_group import RankGroup, run_follower
from rollmesh.learner.distributed.train_plan import TrainPlan
from rollmesh.learner.distributed.trajectories import InlineTrajectories
from rollmesh.learner.distributed.worker import Worker
from rollmesh.learner.engines.interface import Engine
from rollmesh.learner.liveness.rank_watch import RankId, RankWatch
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.mesh.config.learner import DistributedSection
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.learner.engines.models import VOCABULARY


def save_where_ranks_fail(engines: Mapping[str, Engine], out: Path) -> dict[str, list[str]]:
    """Tries to save; gives what each rank was told, by case."""
    actor = engines["actor"]
    version = PolicyVersion(1, 1)
    (out / "file").touch()
    nodes = CheckpointStore(out / f"node{actor.layout.process}")
    full = CheckpointStore(out / "full")

    def told(action: Callable[[], object]) -> list[str]:
        try:
            message = str(action())
        except RollmeshError as error:
            message = f"{error.code}: {error}"
        return [heard.decode() for heard in actor.world.gather_bytes(message.encode())]

    # Ranks meet in a file.
    full.check(actor)

    def save_with_little_space() -> Path:
        with files_up_to(100 if actor.layout.process == 1 else resource.RLIM_INFINITY):
            return full.begin(engines, version, {}).result(240)

    return {
        "rank 0 cannot make the folder": told(
            lambda: CheckpointStore(out / "file" / "c").begin(engines, version, {}).result(240)
        ),
        "each its own folder, at the start": told(lambda: nodes.check(actor)),
        "each its own folder, later": told(lambda: nodes.begin(engines, version, {}).result(240)),
        "rank 1 cannot write": told(save_with_little_space),
        "what is left": told(lambda: sorted(path.name for path in (out / "full").iterdir())),
        "rank 1 can write again": told(lambda: full.begin(engines, version, {}).result(240).name),
    }


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """This process writes no larger files, in bytes; -1: of any size."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def train_without_what_rank_1_cannot_read(
    worker: Worker,
    held: InlineTrajectories,
    groups: list[SampledGroup],
    plan: Callable[[list[SampledGroup]], TrainPlan],
) -> dict[str, Any]:
    """Rank 0 leads, rank 1 follows and has an unknown token in a group of its share; gives what rank 0 sees."""
    whole, channel = plan(groups), RankChannel(DistributedSection())
    watch = RankWatch(None, RankId(dist.get_rank(), 2), silent_s=1.0)
    place = next(index for micro in whole.divisions[2].minibatches[0][1] for index in micro)
    bad = whole.members[place].group_id
    if dist.get_rank() == 1:
        held.set_batch([_with_unknown_token(group) if group.group_id == bad else group for group in groups])
        run_follower(worker, channel, watch)
        return {}
    ranks = RankGroup(worker, channel, watch)
    unusable = ranks.prepare(whole)
    again = ranks.prepare(plan([group for group in groups if group.group_id not in unusable]))
    result = ranks.train(lambda: True)
    ranks.shutdown()
    return {"bad": bad, "unusable": unusable, "again": again, "trained": result is not None}


def _with_unknown_token(group: SampledGroup) -> SampledGroup:
    members = []
    for member in group.members:
        if (found := member.trajectory) is not None:
            ids = found.response_ids.copy()
            ids[-1] = VOCABULARY
            member = dataclasses.replace(member, trajectory=dataclasses.replace(found, response_ids=ids))
        members.append(member)
    return dataclasses.replace(group, members=members)
