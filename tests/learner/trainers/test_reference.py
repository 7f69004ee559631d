"""The reference policy's log-probs: of which policy they are, and what of them is kept."""

from __future__ import annotations

import errno
import io
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.checkpoint.hf_folders import write_adapter_folder
from rollmesh.learner.engines.world import World
from rollmesh.learner.trainers.identity import digest_of, prepared_identity
from rollmesh.learner.trainers.objectives import reference, reference_file
from rollmesh.learner.trainers.objectives.reference_file import ReferenceFile
from rollmesh.mesh.config.trainers.sections import TrainerSection
from rollmesh.mesh.errors import DataError
from rollmesh.trainers import read_trainer_config
from tests.learner.trainers.test_process import weights
from tests.learner.trainers.tiny import ROWS, metrics, train

LORA = {"rank": 4}
SUMS = np.array([[-1.5, -2.25], [-3.0, -4.5], [np.nan, np.nan]])


def kept(run: Path) -> dict[str, np.ndarray]:
    """The files of a run with reference log-probs."""
    return {path.name: np.load(path) for path in sorted(run.glob("prepared-*.npy"))}


@pytest.fixture(scope="module")
def adapter(chat_model: Path, row_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that changes the model much."""
    run = tmp_path_factory.mktemp("adapter") / "sft"
    assert train("sft", chat_model, row_files["sft"], run, learner__lora=LORA, learner__optimizer__lr=0.1)
    (checkpoint,) = (run / "checkpoints").glob("i*")
    lora = read_trainer_config("sft", run / "config.yaml").learner.lora
    assert lora is not None
    write_adapter_folder(checkpoint, chat_model, lora, run / "adapter")
    return run / "adapter"


def test_the_reference_is_the_model_without_its_adapter(
    chat_model: Path, row_files: dict[str, Path], adapter: Path, tmp_path: Path
) -> None:
    """As in a run: also where the adapter begins as another one. So the file is the same one, too."""
    lora: list[dict[str, Any]] = [{}, {"learner__lora": LORA}, {"learner__lora": LORA | {"start_from": str(adapter)}}]
    runs = [tmp_path / f"dpo{place}" for place in range(len(lora))]
    for run, keys in zip(runs, lora, strict=True):
        assert train("dpo", chat_model, row_files["dpo"], run, learner__steps=1, **keys)
    (name, plain), *_ = kept(runs[0]).items()
    for run in runs[1:]:
        assert kept(run).keys() == {name}
        np.testing.assert_allclose(kept(run)[name], plain, rtol=1e-6)
    first = [metrics(run)[0]["rewards/margins"] for run in runs]
    assert first[:2] == pytest.approx([0, 0], abs=1e-6)
    assert metrics(runs[0])[0]["actor/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(first[2]) > 1e-3


@pytest.mark.parametrize("rows", ["kto", pytest.param("dpo", marks=pytest.mark.exhaustive)])
def test_a_pass_that_was_interrupted_continues(
    rows: str, chat_model: Path, row_files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"loss__name": "kto" if rows == "kto" else "sigmoid", "learner__steps": 3}
    assert train("dpo", chat_model, row_files[rows], tmp_path / "whole", **given)
    passes: list[int] = []

    def counted(engine: Any, batch: Any, *, adapter: bool = True) -> torch.Tensor:
        passes.append(batch.counts.sequences)
        return sequence_log_probs(engine, batch, adapter=adapter)

    sequence_log_probs = reference.sequence_log_probs
    monkeypatch.setattr(reference, "sequence_log_probs", counted)
    run = tmp_path / "parts"
    for pieces in (1, 1):
        assert not train("dpo", chat_model, row_files[rows], run, stop_prepared=pieces, **given)
        assert metrics(run) == []
        assert not (run / "checkpoints").exists() or not list((run / "checkpoints").glob("i*"))
    assert train("dpo", chat_model, row_files[rows], run, **given)
    # Each row once, of KTO also each place of the three steps of ten rows.
    assert sum(passes) == (2 * ROWS if rows == "dpo" else ROWS + 30)
    left, right = weights(run), weights(tmp_path / "whole")
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_file_is_written_while_its_values_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world, path = World("cpu", need_group=False), tmp_path / "sums.npy"
    file = ReferenceFile(path, world)
    sums = file.read((3, 2))
    assert np.isnan(sums).all()
    sums[0] = 1.0
    file.keep(sums, 1, 3)
    assert not path.exists()
    assert not caplog.messages
    monkeypatch.setattr(reference_file, "_EVERY_S", 0.0)
    file.keep(sums, 1, 3)
    assert caplog.messages == ["reference log-probs of 1 of 3 rows, about 0 min left"]
    np.testing.assert_array_equal(ReferenceFile(path, world).read((3, 2)), sums)
    more = ReferenceFile(path, world).read((4, 2))
    np.testing.assert_array_equal(more[:3], sums)
    assert np.isnan(more[3]).all()
    for other in ((3, 1), (2, 2), (3,)):
        assert np.isnan(ReferenceFile(path, world).read(other)).all()


def _npy(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def _npz(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, values)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        _npy(SUMS),
        _npz(SUMS),
        _npy(SUMS.astype(str)),
        _npy(SUMS.astype(complex)),
        _npy(SUMS).replace(b"(3, 2)", b"(3, 2 "),
        _npy(SUMS).replace(b"(3, 2), }" + b" " * 14, b"(300000000000000, 2), }"),
    ],
    ids=["empty", "cut off", "without a digest", "npz", "texts", "complex", "no header", "huge"],
)
def test_a_file_of_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "sums.npy"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"sums\.npy cannot be read: its bytes are not those that were") as caught:
        ReferenceFile(path, World("cpu", need_group=False)).read(SUMS.shape)
    assert caught.value.hint.startswith("remove it")


@given(data=st.data())
def test_a_byte_that_has_changed_or_gone_is_found(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.npy"
    file = ReferenceFile(path, World("cpu", need_group=False))
    file.write(SUMS)
    np.testing.assert_array_equal(file.read(SUMS.shape), SUMS)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= data.draw(st.integers(1, 255))
    else:
        del content[place:]
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"changed\.npy cannot be read"):
        file.read(SUMS.shape)


@pytest.mark.parametrize("value", [b"\0" * 8, np.float64(-np.inf).tobytes()])
def test_values_that_were_overwritten_do_not_count_as_computed(value: bytes, tmp_path: Path) -> None:
    path = tmp_path / "sums.npy"
    file = ReferenceFile(path, World("cpu", need_group=False))
    file.write(SUMS)
    content = path.read_bytes()
    start = content.index(SUMS.tobytes())
    path.write_bytes(content[:start] + value * SUMS.size + content[start + SUMS.nbytes :])
    with pytest.raises(DataError, match="cannot be read"):
        file.read(SUMS.shape)


def test_a_disk_that_refuses_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it refuses at last, as the bytes are to be durable."""
    path = tmp_path / "sums.npy"
    file = ReferenceFile(path, World("cpu", need_group=False))
    file.write(SUMS)

    def refuse(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DataError, match="No space left on device"):
        file.write(SUMS + 1)
    np.testing.assert_array_equal(file.read(SUMS.shape), SUMS)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_good_for_one_way_of_computing_alone() -> None:
    def digest(**keys: Any) -> str:
        return digest_of(prepared_identity({"a": "b"}, TrainerSection.model_validate(keys), "cpu"))

    assert digest() == digest(param_dtype="float32") == digest(lora=LORA) == digest(optimizer={"lr": 1e-3})
    others = [{"param_dtype": "bfloat16"}, {"engine": "megatron"}, {"attention": "exact"}, {"float32_logits": False}]
    assert len({digest(), *(digest(**other) for other in others)}) == len(others) + 1
