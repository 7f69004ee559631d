"""The copy of a checkpoint as it is made on CUDA, with host memory in the device's place.

Tensors are the host's. The copy is asked for as on CUDA, and what would be pinned and waited for is noted: nothing is.
`test_cuda` does the same on a device.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._state_dict_stager import StateDictStager, pin_memory_utils

from rollmesh.learner.engines.tensors import state
from rollmesh.learner.engines.tensors.box_state import BoxedTensor
from rollmesh.learner.engines.world import World
from rollmesh.mesh.config.learner import MemorySection
from tests.learner.engines.models import make_engine
from tests.learner.engines.test_gradients import assert_same
from tests.learner.engines.training import train_step, weights


@dataclass
class Device:
    """Attributes:
    pinned: sizes of host memory by address.
    copies: whether each copy was left to the device.
    waits: for the device.
    """

    pinned: dict[int, int] = field(default_factory=dict)
    copies: list[bool] = field(default_factory=list)
    waits: int = 0

    def pin(self, address: int, size: int) -> None:
        assert address not in self.pinned
        self.pinned[address] = size

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found, stage = Device(), StateDictStager._stage_untyped_storage

    def staged(stager: Any, storage: Any, non_blocking: bool = False) -> Any:
        found.copies.append(non_blocking)
        return stage(stager, storage, non_blocking)

    class Stager(StateDictStager):
        def __init__(self, **options: Any) -> None:
            with patch.object(torch.cuda, "is_available", lambda: True):
                super().__init__(**options)

    monkeypatch.setattr(state, "StateDictStager", Stager)
    monkeypatch.setattr(StateDictStager, "_stage_untyped_storage", staged)
    monkeypatch.setattr(pin_memory_utils, "pin_memory", found.pin)
    monkeypatch.setattr(pin_memory_utils, "unpin_memory", found.pinned.pop)
    monkeypatch.setattr(torch.accelerator, "synchronize", found.synchronize)
    return found


@pytest.mark.parametrize(
    "rests", ["nothing", "offload_optimizer", pytest.param("offload_params", marks=pytest.mark.exhaustive)]
)
def test_the_copy_is_pinned_once_and_complete_before_training_continues(
    model_folder: Path, tmp_path: Path, device: Device, rests: str
) -> None:
    memory = MemorySection(**({} if rests == "nothing" else {rests: True}))
    engine, loaded = make_engine(model_folder, memory=memory), make_engine(model_folder)
    engine._writer._world = SimpleNamespace(device=torch.device("cuda"), processes=1, process=0)
    train_step(engine, seed=1)
    steps = 0
    for number in (1, 2):
        at_begin, before = weights(engine), dict(device.pinned)
        written = engine.begin_checkpoint(_made(tmp_path / str(number)), {})
        assert device.waits == number, "for all copies, before training continues"
        assert all(device.copies), "none is waited for by itself"
        if number == 1:
            state_bytes = sum(_size(tensor) for tensor in _tensors(engine))
            assert sum(device.pinned.values()) >= state_bytes
        else:
            assert device.pinned == before, "the same memory as for the first one"
        for _ in range(2):
            steps += 1
            train_step(engine, seed=1 + steps)
        written.result(240)
        loaded.load_checkpoint(tmp_path / str(number))
        assert_same(weights(loaded), at_begin, 0.0)
    engine.close()
    assert sum(device.pinned.values()) == 0, "it is given back"


def test_boxes_are_pinned_once_without_the_memory_around_them(tmp_path: Path, device: Device) -> None:
    world: Any = SimpleNamespace(device=torch.device("cuda"), processes=1, process=0, lend_group=lambda: None)
    writer, around = state.StateWriter(world), torch.arange(5000.0).view(50, 100)
    box = (slice(0, 20), slice(0, 30))
    saved = {"model": {"x": BoxedTensor((20, 30), torch.float32, [(box, around[10:30, 40:70])])}}
    for number in (1, 2):
        around.fill_(number)
        before = dict(device.pinned)
        written = writer.begin(_made(tmp_path / str(number)), saved, 0, {})
        around.zero_()
        assert device.waits == number
        assert not before or device.pinned == before, "the same memory as for the first one"
        assert 20 * 30 * 4 in device.pinned.values()
        assert around.nbytes not in device.pinned.values()
        written.result(240)
        loaded = {"model": {"x": torch.zeros(20, 30)}}
        state.load_state(tmp_path / str(number), World("cpu", need_group=False), loaded)
        assert bool((loaded["model"]["x"] == number).all())
    writer.close()
    # Torch's copy hangs in a circle of its own.
    gc.collect()
    assert not device.pinned, "it is given back"


def test_the_thread_that_writes_asks_no_device(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its present device would be the first one, whichever the rank's is: torch would open that too."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a stream of the device is asked for")

    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", refuse)
    engine = make_engine(model_folder)
    with patch.object(torch.cuda, "is_available", lambda: True):
        engine.begin_checkpoint(_made(tmp_path / "checkpoint"), {}).result(240)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _tensors(engine: Any) -> list[torch.Tensor]:
    parameters = engine._runner.parameters
    moments = (value for p in parameters for value in engine._optimizer.state[p].values() if value.dim())
    return [*parameters, *moments]


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
