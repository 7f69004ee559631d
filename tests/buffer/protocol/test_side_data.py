"""Large data of members next to Redis: stored whole or not at all, named by Redis, checked, and gone with its group."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest

from rollmesh.buffer.client.client import PendingWrite
from rollmesh.buffer.store.side_files import SideFileStore
from rollmesh.mesh.errors import DataError, PayloadError, RollmeshError, StoreError
from rollmesh.mesh.rpc.errors import to_rollmesh_error
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import trajectory_pb2 as trajectory
from tests.buffer.mesh_fixture import TIMEOUT_S, Generator, Mesh, make_write
from tests.buffer.store.test_payloads import begin, upload
from tests.buffer.test_flow import balanced

V0 = PolicyVersion(1, 0)
EXPERTS = np.arange(700_000, dtype=np.int16).reshape(1000, 100, 7)


def with_side(grant: pb.GroupGrant, member: int, *side: trajectory.SideData) -> PendingWrite:
    write = make_write(grant, member, [V0])
    write.head.meta.side.extend(side)
    return write


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


async def written(generator: Generator, writes: Sequence[PendingWrite]) -> list[tuple[int, str]]:
    return [(r.status, r.field) for r in await generator.writer().write(writes)]


async def test_side_data_lives_and_ends_with_its_group(mesh: Mesh) -> None:
    front, learner, generator, (grant,) = await begin(mesh)
    client, folder = generator.client, mesh.folder / front.run_name / "side"
    experts = await client.upload_side("train", grant, 0, "routed_experts", EXPERTS)
    assert (experts.dtype, list(experts.shape), experts.bytes) == ("int16", [1000, 100, 7], 1_400_000)
    image = await client.upload_side("train", grant, 0, "image_0.png", b"not really a picture")
    assert await client.upload_side("train", grant, 0, "image_0.png", b"not really a picture") == image
    assert await written(generator, [with_side(grant, 0, experts, image)]) == [(pb.WRITE_STATUS_STORED, "")]
    assert await written(generator, [make_write(grant, 1, [V0])]) == [(pb.WRITE_STATUS_STORED, "")]
    assert files_in(folder) == sorted(
        f"train/{grant.group_id}/0-{entry.name}-{entry.digest}" for entry in (experts, image)
    )
    (group,) = await learner.batch(learner.sampler(), 1, 0)
    assert list(group.members[0].side) == [experts, image]
    back = await learner.client.fetch_side("train", group.group_id, 0, group.members[0].side[0])
    assert isinstance(back, np.ndarray)
    assert (back.dtype, back.tolist()) == (np.dtype("<i2"), EXPERTS.tolist())
    assert await learner.client.fetch_side("train", group.group_id, 0, image) == b"not really a picture"
    refs = [
        pb.MemberRef(group_id=group.group_id, member=member, side=side)
        for member, side in ((1, ""), (0, "image_0.png"), (0, "routed_experts"), (0, ""))
    ]
    fetched = [data async for data in learner.client.fetch("train", refs)]
    assert fetched == [
        learner.payloads[group.group_id][1],
        b"not really a picture",
        EXPERTS.tobytes(),
        learner.payloads[group.group_id][0],
    ]
    with pytest.raises(DataError, match="no side data audio"):
        await learner.client.fetch_side("train", group.group_id, 0, trajectory.SideData(name="audio"))

    await learner.train([group], 0)
    await learner.client.commit("train", 1, 1)
    async with asyncio.timeout(TIMEOUT_S):
        while files_in(folder):
            await asyncio.sleep(0.02)
    assert (await balanced(learner)).trained == 1
    with pytest.raises(DataError, match="no side data"):
        await learner.client.fetch_side("train", group.group_id, 0, experts)


async def test_a_member_counts_only_with_the_side_data_it_names(mesh: Mesh) -> None:
    front, _, generator, (grant,) = await begin(mesh)
    entry = await generator.client.upload_side("train", grant, 0, "experts", EXPERTS)
    wrong = trajectory.SideData()
    wrong.CopyFrom(entry)
    wrong.digest = "0123456789abcdef"
    rejected = pb.WRITE_STATUS_REJECTED
    assert await written(generator, [with_side(grant, 0, wrong)]) == [(rejected, "meta.side.experts")]
    assert await written(generator, [with_side(grant, 1, entry)]) == [(rejected, "meta.side.experts")]
    assert await written(generator, [with_side(grant, 0, entry, entry)]) == [(rejected, "meta.side[1].name")]
    for field, value in (("name", "../x"), ("name", ""), ("digest", "../../etc"), ("bytes", 0), ("dtype", "object")):
        bad = trajectory.SideData()
        bad.CopyFrom(entry)
        setattr(bad, field, value)
        assert await written(generator, [with_side(grant, 0, bad)]) == [(rejected, f"meta.side[0].{field}")]
    bad.CopyFrom(entry)
    bad.shape[0] = 999
    assert await written(generator, [with_side(grant, 0, bad)]) == [(rejected, "meta.side[0].shape")]
    assert await written(generator, [with_side(grant, 0, entry)]) == [(pb.WRITE_STATUS_STORED, "")]
    assert front.run_name


async def test_names_lead_nowhere_else(mesh: Mesh, tmp_path: Path) -> None:
    front, _, generator, (grant,) = await begin(mesh)
    for name in ("../../evil", "a/b", "", "x" * 65, "a\0b", "ü"):
        with pytest.raises(PayloadError) as caught:
            await generator.client.upload_side("train", grant, 0, name, b"data")
        assert caught.value.field == "side"
        if name:
            request = pb.UploadRequest(
                table="train", group_id=grant.group_id, lease_id=grant.lease_id, attempt=1, side=name, data=b"x"
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await upload(generator, [request])
            assert isinstance(to_rollmesh_error(refused.value, "uploading"), PayloadError)
    with pytest.raises(PayloadError, match="dtype"):
        await generator.client.upload_side("train", grant, 0, "x", np.array([object()]))
    with pytest.raises(PayloadError, match="empty"):
        await generator.client.upload_side("train", grant, 0, "x", b"")
    assert not files_in(mesh.folder / front.run_name / "side")
    store = SideFileStore(tmp_path / "side", 100)
    for group_id in ("..", ".", "a/b", "", ".hidden", "x" * 129):
        with pytest.raises(PayloadError, match="group_id"):
            store.group_folder("train", group_id)


async def test_too_large_or_out_of_order_leaves_nothing(mesh: Mesh) -> None:
    front = await mesh.front(buffer={"side_max_bytes": 1 << 20})
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 1)
    admission = generator.admission()
    admission.update(1, V0)
    (grant,) = await generator.grants(admission, 1)
    with pytest.raises(PayloadError, match="more than 1048576 bytes"):
        await generator.client.upload_side("train", grant, 0, "experts", EXPERTS)
    requests = [
        pb.UploadRequest(
            table="train", group_id=grant.group_id, lease_id=grant.lease_id, attempt=1, side="x", piece=piece, data=b"x"
        )
        for piece in (0, 2)
    ]
    with pytest.raises(grpc.aio.AioRpcError, match="in order"):
        await upload(generator, requests)
    assert not files_in(mesh.folder / front.run_name / "side")


async def test_a_full_disk_is_a_typed_error_and_leaves_nothing(mesh: Mesh) -> None:
    front, _, generator, (grant,) = await begin(mesh)
    generator.client._uploader._retry_s = 0.2
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, hard))
    try:
        with pytest.raises(StoreError, match="side data cannot be stored") as caught:
            await generator.client.upload_side("train", grant, 0, "experts", EXPERTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert "buffer.side_dir" in caught.value.hint
    assert not files_in(mesh.folder / front.run_name / "side")
    entry = await generator.client.upload_side("train", grant, 0, "experts", EXPERTS)
    assert await written(generator, [with_side(grant, 0, entry)]) == [(pb.WRITE_STATUS_STORED, "")]


async def test_damage_is_found(mesh: Mesh) -> None:
    front, learner, generator, (grant,) = await begin(mesh)
    entry = await generator.client.upload_side("train", grant, 0, "experts", EXPERTS)
    await written(generator, [with_side(grant, 0, entry), make_write(grant, 1, [V0])])
    folder = mesh.folder / front.run_name / "side"
    (name,) = files_in(folder)
    data = bytearray((folder / name).read_bytes())
    data[1234] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        await learner.client.fetch_side("train", grant.group_id, 0, entry)
    (folder / name).write_bytes(data[:-1])
    with pytest.raises(DataError, match="shorter"):
        await learner.client.fetch_side("train", grant.group_id, 0, entry)


async def test_a_front_with_another_folder_says_so(mesh: Mesh) -> None:
    first, learner, generator, (grant,) = await begin(mesh)
    config = first._config.model_copy(
        update={"buffer": first._config.buffer.model_copy(update={"side_dir": mesh.folder / "elsewhere"})}
    )
    second = await mesh.front(config)
    entry = await generator.client.upload_side("train", grant, 0, "experts", EXPERTS)
    elsewhere = await mesh.generator(second)
    elsewhere.agent.member_id, elsewhere.agent.generation = generator.agent.member_id, generator.agent.generation
    (result,) = await elsewhere.writer().write([with_side(grant, 0, entry)])
    assert (result.status, result.field) == (pb.WRITE_STATUS_REJECTED, "meta.side.experts")
    assert "every front of the mesh needs the same folder as buffer.side_dir" in result.message
    assert await written(generator, [with_side(grant, 0, entry)]) == [(pb.WRITE_STATUS_STORED, "")]
    with pytest.raises(DataError, match="no side data") as caught:
        await elsewhere.client.fetch_side("train", grant.group_id, 0, entry)
    assert "every front of the mesh needs the same folder" in caught.value.hint
    assert (await learner.client.fetch_side("train", grant.group_id, 0, entry)) is not None


async def test_what_no_one_owns_is_swept_by_age(tmp_path: Path) -> None:
    store = SideFileStore(tmp_path, 1000)

    async def data() -> object:
        yield b"some bytes"

    async def live(group_ids: Sequence[str]) -> list[bool]:
        return [group_id == "train-1" for group_id in group_ids]

    for group_id in ("train-1", "train-2", "train-3"):
        assert await store.receive("train", group_id, 0, "x", data()) == 10  # type: ignore[arg-type]
    (tmp_path / "train" / "train-1" / "abc.part").write_bytes(b"unfinished")
    assert await store.sweep("train", live, 3600) == 0
    for path in (tmp_path / "train").rglob("*"):
        if "train-3" not in str(path):
            os.utime(path, (1, 1))
    assert await store.sweep("train", live, 3600) == 2
    assert [name.split("/")[1] for name in files_in(tmp_path)] == ["train-1", "train-3"]
    await store.remove("train", ["train-1", "train-3", "../train", "train-9", ""], live)
    assert [name.split("/")[1] for name in files_in(tmp_path)] == ["train-1"], "only what has ended is removed"


async def test_no_one_uploads_for_a_group_that_is_not_his(mesh: Mesh) -> None:
    front, _, generator, (grant,) = await begin(mesh)
    other = pb.GroupGrant()
    other.CopyFrom(grant)
    other.lease_id = "stolen"
    entry = await generator.client.upload_side("train", other, 0, "experts", EXPERTS)
    assert not files_in(mesh.folder / front.run_name / "side")
    other.group_id = "train-99"
    assert await generator.client.upload_side("train", other, 0, "experts", EXPERTS) == entry
    late = with_side(other, 0, entry)
    assert await written(generator, [late]) == [(pb.WRITE_STATUS_SUPERSEDED, "")]
    with pytest.raises(RollmeshError, match="the group has fewer members"):
        await generator.client.upload_side("train", grant, 9, "experts", EXPERTS)
