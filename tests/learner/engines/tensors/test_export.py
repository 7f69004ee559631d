"""Full tensors, put together from the boxes of processes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from rollmesh.learner.engines.tensors.boxes import full_box
from rollmesh.learner.engines.tensors.divided_tensor import DividedTensor, whole
from rollmesh.learner.engines.tensors.export import exported_tensors, full_tensors, own_shards
from rollmesh.testing.engine_cases import assert_same
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines.tensors import divided_cases

torch.set_num_threads(1)
FOUR = EngineLayout("four_processes", processes=4)
ALONE = SimpleNamespace(process=0, processes=1, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("holders", "gather_bytes"), [((0,), 100), ((3, 1), 130), (range(4), 1 << 20), (range(4), 90)])
def test_holders_receive_full_tensors_however_they_are_divided(engine_worlds, holders, gather_bytes, dtype):
    """Pieces of messages end amid elements too."""
    seen = engine_worlds(FOUR).run(divided_cases.exported, holders, gather_bytes, dtype)
    expected = {
        name: full.to(dtype) if full.is_floating_point() else full for name, full in divided_cases.full_values().items()
    }
    described = seen[0][1]
    assert all(others == described for _, others, _ in seen)
    assert [tensor.name for tensor in described] == list(expected)
    assert {tensor.holder for tensor in described} == set(holders)
    for process, (found, _, _) in enumerate(seen):
        assert list(found) == [tensor.name for tensor in described if tensor.holder == process]
        assert {name: full.dtype for name, full in found.items()} == {name: expected[name].dtype for name in found}
        assert all(torch.equal(full, expected[name]) for name, full in found.items())
    for tensor in described:
        assert (tensor.shape, tensor.dtype) == (tuple(expected[tensor.name].shape), expected[tensor.name].dtype)


def test_memory_is_bounded_wherever_the_tensors_are(engine_worlds):
    """A single tensor has 288 bytes, one after the other comes from one process, and a message has 128 at most."""
    seen = engine_worlds(FOUR).run(divided_cases.exported, range(4), 64, torch.float32)
    for _, _, most in seen:
        assert most["full"] <= 320
        assert most["arrived"] <= 64
        assert most["sent"] <= 64 + 128


def test_the_parts_of_all_processes_fill_every_tensor_once(engine_worlds):
    seen = engine_worlds(FOUR).run(divided_cases.shards)
    times, filled = Counter(), {name: torch.zeros_like(full) for name, full in divided_cases.full_values().items()}
    for parts in seen:
        for name, box, part in parts:
            times[name] += part.numel()
            filled[name][box] = part
    assert all(torch.equal(filled[name], full) for name, full in divided_cases.full_values().items())
    assert times == {name: full.numel() for name, full in filled.items() if full.numel()}
    assert all(seen), "copies take turns"


def test_a_process_alone_copies_only_what_it_has_in_several_boxes():
    full = divided_cases.numbered((4, 6))
    boxes = [divided_cases.columns((4, 6), 0, 2), divided_cases.columns((4, 6), 2, 6)]
    several = DividedTensor("several", (4, 6), full.dtype, 1, lambda _: (0, boxes), divided_cases.held(full, boxes))
    tensors = [whole("whole", full, 1), several]
    found = dict(full_tensors(tensors, ALONE, torch.float32))
    assert found["whole"].data_ptr() == full.data_ptr()
    assert_same(found, {"whole": full, "several": full}, 0.0)
    assert [tensor.holder for tensor in exported_tensors(tensors, torch.float32)] == [0, 0]
    own = [(name, box) for name, box, _ in own_shards(tensors, ALONE, torch.float32)]
    assert own == [("whole", full_box((4, 6))), *(("several", box) for box in boxes)]
