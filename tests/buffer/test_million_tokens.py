"""One trajectory of a million tokens, and of five, through a real front process. Messages stay below gRPC's default
limit, and the front never holds one whole."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from rollmesh.buffer.client.client import PendingWrite
from rollmesh.learner.distributed.train_plan import PlannedMember
from rollmesh.learner.distributed.trajectories import FetchedTrajectories
from rollmesh.learner.rollouts.group import decode_group, unsent_members
from rollmesh.learner.rollouts.group_stream import fetch_unsent
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.trajectory.payload_codec import Codec, Trajectory, encode
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import trajectory_pb2 as trajectory
from tests.buffer.front_processes import FrontProcess
from tests.buffer.mesh_fixture import BufferClient, Mesh, head_of_write, make_config

V0 = PolicyVersion(1, 0)
LIMIT_MB = 4


@pytest.fixture
async def front(tmp_path: Path, redis_url: str) -> AsyncIterator[FrontProcess]:
    config = make_config(tmp_path, redis_url, network={"max_message_mb": LIMIT_MB})
    process = FrontProcess(tmp_path, config, forked=False)
    await process.start()
    yield process
    await process.end(signal.SIGKILL)


def long_trajectory(tokens: int) -> Trajectory:
    """Tool output in the middle, and a version that changes on the way."""
    rng = np.random.default_rng(0)
    mask = np.ones(tokens, np.uint8)
    mask[tokens // 3 : tokens // 2] = 0
    log_probs = -rng.exponential(1.0, tokens).astype(np.float32) * mask
    runs = VersionRuns(((tokens - 1000, V0), (1000, PolicyVersion(1, 1))))
    return Trajectory(rng.integers(0, 150_000, tokens, dtype=np.int32), log_probs, mask, runs)


def write_of(grant: pb.GroupGrant, member: int, value: Trajectory, codec: Codec) -> PendingWrite:
    meta = trajectory.MemberMeta(
        member=member, outcome=trajectory.OUTCOME_SCORED, reward=1.0, prompt_tokens=4,
        response_tokens=len(value.response_ids), oldest=value.versions.oldest.to_proto(),
        newest=value.versions.newest.to_proto(),
    )  # fmt: skip
    return PendingWrite(head_of_write(grant, meta), encode(value, codec=codec))


# To the front and to its memory a compressed payload is as any other of its size.
@pytest.mark.parametrize(
    ("tokens", "codec"),
    [pytest.param(1_000_000, "zstd", marks=pytest.mark.exhaustive), (5_000_000, "none")],
    ids=["1M-zstd", "5M"],
)
async def test_a_very_long_trajectory_is_written_sealed_leased_and_read(
    mesh: Mesh, front: FrontProcess, tokens: int, codec: Codec
) -> None:
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    for actor in (learner, generator):
        # As a service would: the limit holds at both ends.
        await actor.channel.close()
        actor.channel = open_channel(front.address, make_config(Path()).security, max_message_mb=LIMIT_MB)
        actor.client = BufferClient(actor.channel, timeout_s=5.0, retry_s=30.0)
    await learner.seed(1, 1)
    admission = generator.admission()
    admission.update(1, V0)
    (grant,) = await generator.grants(admission, 1)
    long, short = long_trajectory(tokens), long_trajectory(2_000)
    await generator.writer().write([write_of(grant, 1, short, "none")])
    before = front.reset_peak()
    written = write_of(grant, 0, long, codec)
    (result,) = await generator.writer().write([written])
    assert (result.status, result.sealed) == (pb.WRITE_STATUS_STORED, True), result
    (leased,) = await learner.batch(learner.sampler(), 1, 0)
    assert unsent_members(leased)[0] == 0
    fetched = await fetch_unsent(learner.client, "train", leased)
    group = decode_group(leased, learner.payloads[leased.group_id], fetched)
    grown = front.peak() - before
    # A rank that trains its share gets it by name.
    planned = [PlannedMember(0, leased.group_id, m.member, m.response_tokens, 1.0, False) for m in leased.members]
    ranks = FetchedTrajectories(None, learner.client, timeout_s=1.0)  # type: ignore[arg-type]  # this loop is the bridge
    of_rank = await ranks._get(planned)
    for found, expected in zip([*(m.trajectory for m in group.members), *of_rank], (long, short) * 2, strict=True):
        assert isinstance(found, Trajectory)
        for name in ("response_ids", "log_probs", "response_mask"):
            assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        assert found.versions == expected.versions
    size = len(written.payload)
    print(f"{size / 2**20:.1f} MiB: the front's peak grew by {grown / 2**20:.1f} MiB over {before / 2**20:.0f}")
    # It holds a few messages; a long payload held whole would be added to them.
    assert grown < (10 * LIMIT_MB) << 20
    assert (await learner.train([leased], 0)).claimed
