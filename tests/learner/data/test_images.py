"""Rows with images: every form that datasets have them in, and what the model sees of their prompts."""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors.numpy import save_file

from rollmesh.learner.coordinator.prompt_sources import open_prompts
from rollmesh.learner.data.images import load_images, split_images
from rollmesh.learner.data.prompts import PromptEncoder, RefusedRow, TaskShape
from rollmesh.learner.data.rows import Row
from rollmesh.learner.model_files.location import resolve_model
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.trajectory.image_files import ImageFiles, image_folder
from rollmesh.mesh.trajectory.images import MAX_IMAGE_BYTES, ImageProcessor
from tests.generators.engines.tiny_vlm import IMAGE, WIDTH, TinyVlm, picture
from tests.learner.data.conftest import open_file, record, write_jsonl

SHAPE = TaskShape(n=2, temperature=1, max_tokens=4)
PNG, JPEG = picture(1), picture(2, "JPEG")


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> TinyVlm:
    return TinyVlm(tmp_path_factory.mktemp("vlm"))


def encoder(vlm: TinyVlm, longest: int = 64, *, blind: bool = False) -> PromptEncoder:
    images = None if blind else ImageProcessor.load(vlm.folder)
    return PromptEncoder(vlm.tokenizer, max_prompt_tokens=longest, template_kwargs={}, images=images)


def encoded(vlm: TinyVlm, row: Row, **more: Any) -> Any:
    return encoder(vlm, **more).encode(row, SHAPE, number=0, task_id="a", ordinal=1)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_images_of_every_form_become_a_prompt_with_one_placeholder_each(tmp_path: Path, vlm: TinyVlm) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    text = base64.b64encode(PNG).decode()
    two = [{"type": "image"}, {"type": "text", "text": "the "}, {"type": "image"}]
    inside = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}},
        {"type": "text", "text": "the "},
        {"type": "image", "image": "a.png"},
    ]
    rows = [
        record(0, prompt=user("<image>the <image>"), images=["a.png", {"bytes": None, "path": "a.png"}]),
        record(1, prompt=user(two), images=[text, str(tmp_path / "a.png")]),
        record(2, prompt=user(inside)),
        record(3, prompt="<image>the <image>", images=[text, text]),
        record(4, prompt=user("the ")),
    ]
    found = open_file(write_jsonl(tmp_path / "d.jsonl", rows)).rows(range(5))
    tasks = [encoded(vlm, row) for row in found]
    for task in tasks[:4]:
        assert list(task.images) == [PNG, PNG]
    ids = [np.frombuffer(task.prompt_ids, "<i4").tolist() for task in tasks]
    words = vlm.tokenizer("the ", add_special_tokens=False)["input_ids"]
    assert ids[0] == ids[1] == ids[2] == [IMAGE, *words, IMAGE, 2]
    assert ids[3] == [IMAGE, *words, IMAGE]
    assert ids[4] == [*words, 2]
    assert not tasks[4].images


def test_parquet_has_them_as_encoded_bytes(tmp_path: Path, vlm: TinyVlm) -> None:
    rows = [
        record(0, prompt=user("<image>a"), images=[{"bytes": JPEG, "path": None}]),
        record(1, prompt=user("b"), images=None),
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    first, second = (encoded(vlm, row) for row in open_file(tmp_path / "d.parquet").rows([0, 1]))
    assert list(first.images) == [JPEG]
    assert not second.images


def test_a_prompt_is_as_long_as_the_model_sees_it(tmp_path: Path, vlm: TinyVlm) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [record(0, prompt="<image>", images=["a.png"])])
    (tmp_path / "a.png").write_bytes(PNG)
    [row] = open_file(path).rows([0])
    assert encoded(vlm, row, longest=WIDTH).prompt_ids == np.array([IMAGE], "<i4").tobytes()
    assert encoded(vlm, row, longest=WIDTH - 1) == RefusedRow(f"{path}, row 0", "long_prompt", WIDTH)


@pytest.mark.parametrize(
    ("prompt", "images", "reason"),
    [
        (user("<image>"), ["a.png", "a.png"], "2 images for 1 marks"),
        (user("none"), ["a.png"], "1 images for 0 marks"),
        (user([{"type": "image"}]), None, "0 images for 1 marks"),
        (user([{"type": "video"}]), None, "'video'"),
        (user("<image>"), ["https://somewhere/a.png"], "network"),
        (user("<image>"), [7], "int"),
        (user("<image>"), "a.png", "expected a list"),
    ],
)
def test_what_no_row_can_have_is_refused_at_the_start(tmp_path: Path, prompt: Any, images: Any, reason: str) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [record(0, prompt=prompt, images=images)])
    with pytest.raises(DataError, match=reason):
        open_file(path)


def test_images_that_no_one_can_take_are_refused(tmp_path: Path, vlm: TinyVlm) -> None:
    (tmp_path / "large.png").write_bytes(bytes(MAX_IMAGE_BYTES + 1))
    (tmp_path / "broken.png").write_bytes(b"no image")
    rows = [record(0, prompt="<image>", images=[f"{name}.png"]) for name in ("large", "absent", "broken")]
    large, absent, broken = open_file(write_jsonl(tmp_path / "d.jsonl", rows)).rows(range(3))
    for row, reason in ((large, "at most"), (absent, "absent.png"), (broken, "cannot be read")):
        with pytest.raises(DataError, match=reason):
            encoded(vlm, row)
    with pytest.raises(DataError, match="a model that is trained with images"):
        encoded(vlm, large, blind=True)


def test_files_of_images_are_measured_before_they_are_read(tmp_path: Path) -> None:
    """One that is far larger than the limit would fill the memory, and a pipe would be waited for."""
    with (tmp_path / "sparse.png").open("wb") as file:
        file.truncate(1 << 33)
    with pytest.raises(DataError, match=f"row 0: its images have {1 << 33} bytes"):
        load_images("row 0", [tmp_path / "sparse.png"])
    os.mkfifo(tmp_path / "pipe.png")
    for odd in (tmp_path / "pipe.png", Path("/dev/zero"), tmp_path):
        with pytest.raises(DataError, match=f"row 0: image {odd} is no regular file"):
            load_images("row 0", [odd])


def test_images_with_too_many_pixels_are_refused_with_their_row(tmp_path: Path, vlm: TinyVlm) -> None:
    """A file of 8 kB has 64 million pixels here."""
    Image.new("1", (8001, 8000)).save(tmp_path / "bomb.png")
    path = write_jsonl(tmp_path / "d.jsonl", [record(0, prompt="<image>", images=["bomb.png"])])
    [row] = open_file(path).rows([0])
    with pytest.raises(DataError, match="row 0: images: 1 of its 1 images have 64008000 pixels") as refused:
        encoded(vlm, row)
    assert refused.value.hint == "scale them down"


def test_held_out_images_are_refused_where_the_engine_takes_none(tmp_path: Path, vlm: TinyVlm) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    train = write_jsonl(tmp_path / "train.jsonl", [record(0, prompt="the ")])
    held_out = write_jsonl(tmp_path / "eval.jsonl", [record(0, prompt="<image>", images=["a.png"])])
    values = {"model": {"path": str(vlm.folder)}, "data": {"train": str(train), "eval": str(held_out)}}
    _, tasks = open_prompts(load_config(values), vlm.tokenizer, greedy=0)
    assert tasks is not None
    assert list(tasks[0].images) == [PNG]
    with pytest.raises(DataError, match="need the engine hf or vllm"):
        open_prompts(load_config(values, ["rollout.engine=sglang"]), vlm.tokenizer, greedy=0)


def test_images_are_written_once_their_prompt_is_queued(tmp_path: Path, vlm: TinyVlm) -> None:
    """And not by the check of all rows at the start."""
    (tmp_path / "a.png").write_bytes(PNG)
    train = write_jsonl(tmp_path / "train.jsonl", [record(0, prompt="<image>", images=["a.png"])])
    values = {
        "model": {"path": str(vlm.folder)},
        "data": {"train": str(train), "on_long_prompt": "refuse"},
        "run": {"dir": str(tmp_path)},
    }
    config = load_config(values)
    prompts, _ = open_prompts(config, vlm.tokenizer, greedy=0)
    files = ImageFiles(image_folder(config))
    assert not files.folder.exists()
    [task] = prompts.after(0, 1).tasks
    assert files.read(task.image_digests) == (PNG,)


def test_a_model_that_the_learner_cannot_train_is_refused(vlm: TinyVlm, tmp_path: Path) -> None:
    folder = shutil.copytree(vlm.folder, tmp_path / "model")
    save_file({"weight": np.zeros(2, np.float32)}, folder / "model.safetensors")
    assert resolve_model(ModelSection(path=str(folder))).path == str(folder), "one that it can train"
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "paligemma"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"paligemma.* does not train.*choose one of idefics3, llava"):
        resolve_model(ModelSection(path=str(folder)))


def test_a_message_of_calls_alone_has_no_parts() -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    messages, brought = split_images([*user("<image>what"), calling])
    assert (messages[1], brought) == (calling, [None])
