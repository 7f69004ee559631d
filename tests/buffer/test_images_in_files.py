"""Images of prompts lie in files: Redis and the learner have their digests, and a generator gets the images."""

from __future__ import annotations

import asyncio

import pytest

from rollmesh.mesh.trajectory.image_files import ImageFiles
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.buffer.mesh_fixture import TIMEOUT_S, Mesh, make_task, prompts_of
from tests.buffer.test_flow import balanced

V0 = PolicyVersion(1, 0)
IMAGES = [b"one image" * 1000, b"another"]


def pictured(ordinal: int):
    task = make_task(ordinal)
    task.images.extend(IMAGES)
    return task


async def test_redis_and_the_learner_have_digests_and_the_generator_gets_images(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    for _ in range(2):
        # The second time changes nothing.
        await learner.client.seed("train", learner.incarnation, [pictured(1), make_task(2)])
    [name] = await prompts_of(front, 1)
    [stored] = await front.access.batch([("GET", name)])
    assert not any(image in stored for image in IMAGES)
    admission = generator.admission()
    admission.update(2, V0)
    grants = await generator.grants(admission, 2)
    assert [list(grant.task.images) for grant in grants] == [IMAGES, []]
    await generator.finish(generator.writer(), grants, V0)
    first, second = await learner.batch(learner.sampler(), 2, 0)
    assert not first.task.images
    assert not second.task.image_digests
    files = ImageFiles(front.metrics.front.store.side.folder / "images")  # type: ignore[union-attr]
    assert files.read(first.task.image_digests) == tuple(IMAGES)


async def test_a_prompt_whose_image_is_lost_ends_as_failed(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.client.seed("train", learner.incarnation, [pictured(1), make_task(2)])
    for path in (front.metrics.front.store.side.folder / "images").rglob("*"):  # type: ignore[union-attr]
        if path.is_file():
            path.unlink()
    admission = generator.admission()
    admission.update(2, V0)
    [grant] = await generator.grants(admission, 1)
    assert grant.task.ordinal == 2
    async with asyncio.timeout(TIMEOUT_S):
        while not (counts := await balanced(learner)).failed:
            await asyncio.sleep(0.02)
    assert counts.failed == 1
    assert "no image at" in caplog.text
