"""Tensors that are saved and loaded in boxes."""

from __future__ import annotations

import pytest
import torch

from rollmesh.learner.engines.tensors.box_state import BoxedTensor
from rollmesh.learner.engines.tensors.boxes import rectangles
from rollmesh.learner.engines.tensors.checkpoint_tensors import read_tensors
from rollmesh.learner.engines.tensors.state import StateWriter, load_state
from rollmesh.learner.engines.world import World
from rollmesh.mesh.errors import DataError
from rollmesh.testing.engine_cases import assert_same
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines.tensors import divided_cases
from tests.learner.engines.tensors.divided_cases import WRITE_S, boxed, columns, numbered, put_together, rows

torch.set_num_threads(1)
TWO = EngineLayout("two_ranks", processes=2)
MATRIX, STACK, NUMBER = numbered((5, 6)), numbered((3, 4, 2), 100), torch.tensor(3.5)


@pytest.fixture
def writer():
    writer = StateWriter(World("cpu", need_group=False))
    yield writer
    writer.close()


def state():
    """Matrices in columns and in a run's boxes, a stack in another run's, and a number."""
    return {
        "model": {
            "matrix": boxed(MATRIX, [columns((5, 6), 4, 6), columns((5, 6), 0, 4)]),
            "runs": boxed(MATRIX, [*rectangles((5, 6), 0, 7), *rectangles((5, 6), 7, 30)]),
            "stack": boxed(STACK, rectangles((3, 4, 2), 0, 13) + rectangles((3, 4, 2), 13, 24)),
        },
        "optimizer": {"state": {"matrix": {"step": boxed(NUMBER, [()]), "plain": MATRIX.clone()}}},
    }


def test_boxes_are_loaded_as_plain_tensors_and_as_other_boxes(writer, tmp_path):
    saved = state()
    assert len(saved["model"]["stack"].parts) > 2
    writer.begin(tmp_path, saved, 4, {"cursor": 1}).result(WRITE_S)
    plain = {
        "model": {"matrix": torch.zeros(5, 6), "runs": torch.zeros(5, 6), "stack": torch.zeros(3, 4, 2)},
        "optimizer": {"state": {"matrix": {"step": torch.zeros(()), "plain": torch.zeros(5, 6)}}},
    }
    world = World("cpu", need_group=False)
    assert load_state(tmp_path, world, plain) == (4, {"cursor": 1})
    expected = {"matrix": MATRIX, "runs": MATRIX, "stack": STACK}
    assert_same(plain["model"], expected, 0.0)
    assert_same(plain["optimizer"]["state"]["matrix"], {"step": NUMBER, "plain": MATRIX}, 0.0)
    described = {name: torch.empty(full.shape, device="meta") for name, full in expected.items()}
    assert_same(dict(read_tensors(tmp_path, described, torch.float32)), expected, 0.0)

    memory = torch.full((6, 5), -1.0)
    transposed = memory.mT[1:4, 2:]
    other = BoxedTensor((5, 6), torch.float32, [((slice(1, 4), slice(2, 6)), transposed)])
    optimizer = {"state": {"matrix": {"plain": boxed(torch.zeros(5, 6), [rows((5, 6), 0, 2), rows((5, 6), 4, 5)])}}}
    load_state(tmp_path, world, {"model": {**plain["model"], "matrix": other}, "optimizer": optimizer})
    assert torch.equal(transposed, MATRIX[1:4, 2:])
    assert int((memory == -1).sum()) == 30 - 12, "nothing else is written"
    found = put_together(optimizer["state"]["matrix"]["plain"])
    assert torch.equal(found[[0, 1, 4]], MATRIX[[0, 1, 4]])
    assert not found[2:4].any()


def test_the_boxes_alone_are_copied_each_time_into_the_same_memory(writer, tmp_path):
    memory = numbered((100, 6))
    saved = {"model": {"x": BoxedTensor((5, 2), torch.float32, [(columns((5, 2), 0, 2), memory[:5, 3:5])])}}
    kept = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        memory.fill_(number)
        written = writer.begin(folder, saved, 0, {})
        memory.fill_(-1.0)
        written.result(WRITE_S)
        (found,) = read_tensors(folder, {"x": torch.empty(5, 2, device="meta")}, torch.float32)
        assert torch.equal(found[1], torch.full((5, 2), float(number)))
        ((copy,),) = writer._copies._kept.values()
        kept.append(copy.data_ptr())
        assert copy.untyped_storage().nbytes() == 5 * 2 * 4
    assert kept[0] == kept[1]


def test_boxes_of_another_shape_are_refused(writer, tmp_path):
    writer.begin(tmp_path, state(), 0, {}).result(WRITE_S)
    with pytest.raises(DataError, match="Size mismatch"):
        other = {"model": {**state()["model"], "matrix": BoxedTensor((5, 7), torch.float32, [])}}
        load_state(tmp_path, World("cpu", need_group=False), other)


def test_what_two_processes_save_is_loaded_in_any_division(engine_worlds, tmp_path):
    engine_worlds(TWO).run(divided_cases.save_boxes, tmp_path)
    expected = dict.fromkeys(("rows", "columns", "runs", "alone", "both"), MATRIX)
    for loaded in engine_worlds(TWO).run(divided_cases.load_boxes, tmp_path):
        for steps, found in loaded:
            assert steps == 3
            assert_same(found, expected, 0.0)
    described = {name: torch.empty(5, 6, device="meta") for name in expected}
    assert_same(dict(read_tensors(tmp_path, described, torch.float32)), expected, 0.0)
    written = [path.stat().st_size for path in tmp_path.glob("*.distcp")]
    assert len(written) == 2


def test_a_tensor_that_processes_do_not_fill_is_refused(engine_worlds, tmp_path):
    told = engine_worlds(TWO).run(divided_cases.save_with_a_hole, tmp_path)
    assert any("invalid fill" in each for each in told)


def test_fsdp2_continues_from_boxes_and_boxes_from_fsdp2(engine_worlds, engine_models, tmp_path):
    for name in ("fsdp2", "boxes"):
        (tmp_path / name).mkdir()
    for expected, found, same in engine_worlds(TWO).run(
        divided_cases.exchange_with_fsdp2, engine_models["experts"], tmp_path
    ):
        assert same
        assert all(same.values())
        assert not any("param_groups" in name for name in same)
        if expected:
            assert_same(found, expected, 0.0)


def test_a_model_that_lacks_tensors_of_the_checkpoint_is_refused(writer, tmp_path):
    folder = tmp_path / "saved"
    writer.begin(folder, state(), 1, {}).result(WRITE_S)
    fewer = state()
    del fewer["model"]["stack"]
    with pytest.raises(DataError, match=r"the model lacks 1 tensor\(s\) of the checkpoint, model\.stack among them"):
        load_state(folder, World("cpu", need_group=False), fewer)
