"""From a row with an image to a response: dataset, task, buffer, grant, engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash

from rollmesh.buffer.server.request_validation import check_tasks
from rollmesh.learner.data.prompts import PromptEncoder, TaskShape
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.images import MAX_IMAGE_BYTES, ImageProcessor
from rollmesh.mesh.trajectory.payload_codec import decode
from rollmesh.protos import trajectory_pb2
from tests.generators.engines.tiny_vlm import IMAGE, TinyVlm, picture
from tests.generators.world import mesh
from tests.learner.data.conftest import open_file, record, write_jsonl


async def test_a_row_with_an_image_is_answered_by_a_generator_that_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm = TinyVlm(tmp_path / "vlm")
    weights = vlm.random_weights(1)
    prompt = [{"role": "user", "content": "<image>a"}]
    (tmp_path / "a.png").write_bytes(picture(1))
    rows = [
        record(0, prompt=prompt, images=["a.png"], data_source="demo/arithmetic"),
        record(1, prompt=[{"role": "user", "content": "a"}], data_source="demo/arithmetic"),
    ]
    encoder = PromptEncoder(
        vlm.tokenizer, max_prompt_tokens=16, template_kwargs={}, images=ImageProcessor.load(vlm.folder)
    )
    shape = TaskShape(n=4, temperature=1, max_tokens=12)
    tasks = [
        encoder.encode(row, shape, number=index, task_id=f"t{index}", ordinal=index + 1)
        for index, row in enumerate(open_file(write_jsonl(tmp_path / "d.jsonl", rows)).rows([0, 1]))
    ]
    async with mesh(tmp_path) as world:
        world.model_folder = vlm.folder
        monkeypatch.setattr(world, "model", lambda _: vlm.build(vlm.config, 1))
        learner = await world.learner()
        await learner.publish(0)
        await learner.client.seed("train", learner.incarnation, tasks)
        world.generator()
        groups = {group.task.row: group for group in await learner.sample(2, 0)}
        assert list(groups[0].task.image_digests) == [xxhash.xxh3_128_hexdigest(picture(1))]
        assert not [group for group in groups.values() if group.task.images], "a learner reads the files"
        assert not groups[1].task.image_digests
        for row, images in ((0, [picture(1)]), (1, [])):
            ids = np.frombuffer(groups[row].task.prompt_ids, "<i4").tolist()
            assert ids.count(IMAGE) == len(images)
            for payload in learner.payloads[groups[row].group_id]:
                found = decode(payload)
                expected = vlm.log_probs(weights, ids, images, found.response_ids.tolist())
                np.testing.assert_allclose(found.log_probs, expected, atol=1e-4)


def test_images_that_are_too_large_for_their_prompt_are_not_stored() -> None:
    def task(size: int) -> trajectory_pb2.PromptTask:
        return trajectory_pb2.PromptTask(ordinal=1, n=1, prompt_ids=bytes(4), images=[bytes(size), b"more"])

    check_tasks([task(MAX_IMAGE_BYTES - 4)], [0], 1)
    with pytest.raises(PayloadError, match="images"):
        check_tasks([task(MAX_IMAGE_BYTES)], [0], 1)
