"""Tensors that processes hold in boxes, and what they do with them in `test_export` and `test_box_state`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollmesh.learner.engines.fsdp2.optimizer_state import saved_state
from rollmesh.learner.engines.interface import ExportedTensor, WeightShard
from rollmesh.learner.engines.tensors import export
from rollmesh.learner.engines.tensors.box_state import BoxedTensor
from rollmesh.learner.engines.tensors.boxes import Box, full_box, rectangles
from rollmesh.learner.engines.tensors.divided_tensor import DividedTensor, whole
from rollmesh.learner.engines.tensors.state import StateWriter, load_state
from rollmesh.learner.engines.world import World
from rollmesh.testing.contract_state import Weights, save
from rollmesh.testing.engine_cases import make_sequences, make_spec, train, weights
from rollmesh.testing.worlds import Harness

WRITE_S = 60.0
Place = Callable[[int], tuple[int, Sequence[Box]]]


def numbered(shape: Sequence[int], first: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of consecutive numbers."""
    return torch.arange(first, first + prod(shape)).to(dtype).view(*shape)


def rows(shape: Sequence[int], start: int, stop: int) -> Box:
    """Some rows of a tensor."""
    return (slice(start, stop), *full_box(shape[1:]))


def columns(shape: Sequence[int], start: int, stop: int) -> Box:
    """Some columns of a matrix."""
    return (slice(0, shape[0]), slice(start, stop))


def held(full: Tensor, boxes: Sequence[Box]) -> list[Tensor]:
    """Boxes of a tensor as views of memory that has nothing else of it."""
    memory = torch.full_like(full, 77)
    for box in boxes:
        memory[box] = full[box]
    return [memory[box] for box in boxes]


def _expert(process: int, start: int, stop: int) -> Box:
    expert = (process + 1) % 4
    return (slice(expert, expert + 1), slice(start, stop), slice(0, 3))


def _third_process(process: int) -> tuple[int, list[Box]]:
    return 0, [full_box((9, 3))] if process == 2 else []


# Divisions over four processes, each of a kind that engines have. Copies differ from tensor to tensor.
PLACES: dict[str, tuple[tuple[int, ...], int, Place]] = {
    "rows": ((6, 5), 2, lambda p: (p // 2, [rows((6, 5), 3 * (p % 2), 3 * (p % 2) + 3)])),
    "columns": ((4, 7), 2, lambda p: (p % 2, [columns((4, 7), *((0, 3), (3, 7))[p // 2])])),
    "an expert each, in two boxes": ((4, 6, 3), 1, lambda p: (0, [_expert(p, 2, 6), _expert(p, 0, 2)])),
    **{f"one process alone {number}": ((9, 3), 1, _third_process) for number in range(3)},
    "runs": ((6, 4), 1, lambda p: (0, rectangles((6, 4), 6 * p, 6 * p + 6))),
}


def full_values() -> dict[str, Tensor]:
    """The full tensors of `divided`."""
    values = {name: numbered(shape, 100 * number) for number, (name, (shape, *_)) in enumerate(PLACES.items())}
    return {**values, "each whole": numbered((5,), 600), "a number": torch.tensor(7), "nothing": torch.zeros(0, 3)}


def divided(process: int) -> list[DividedTensor]:
    """Tensors as one of four processes holds them."""
    found = []
    for name, full in full_values().items():
        if name in PLACES:
            shape, copies, place = PLACES[name]
            found.append(DividedTensor(name, shape, full.dtype, copies, place, held(full, place(process)[1])))
        else:
            found.append(whole(name, full, 4))
    return found


def exported(
    _: Harness, holders: Sequence[int], gather_bytes: int, dtype: torch.dtype
) -> tuple[Weights, list[ExportedTensor], dict[str, int]]:
    """One holder of an export: its tensors, the description of all of them, and the most bytes of each use."""
    world, most = World("cpu", need_group=True), {}
    tensors = divided(world.process)

    class Noting(export._Staging):
        def reserve(self, use: str, nbytes: int, *, pinned: bool = False) -> Tensor:
            most[use] = max(most.get(use, 0), nbytes)
            return super().reserve(use, nbytes, pinned=pinned)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "_Staging", Noting)
        found = {name: full.clone() for name, full in export.full_tensors(tensors, world, dtype, holders, gather_bytes)}
    return found, export.exported_tensors(tensors, dtype, holders, gather_bytes), most


def shards(_: Harness) -> list[WeightShard]:
    """A process's own parts."""
    world = World("cpu", need_group=True)
    own = export.own_shards(divided(world.process), world, torch.float32)
    return [(name, box, part.clone()) for name, box, part in own]


def boxed(full: Tensor, boxes: Sequence[Box]) -> BoxedTensor:
    """A tensor of which a process has some boxes."""
    return BoxedTensor(full.shape, full.dtype, zip(boxes, held(full, boxes), strict=True))


def put_together(tensor: BoxedTensor) -> Tensor:
    """A full tensor with the boxes that a process has, and zeros elsewhere."""
    full = torch.zeros(tensor.shape, dtype=tensor.dtype)
    for box, view in tensor.parts:
        full[box] = view
    return full


def save_boxes(_: Harness, folder: Path) -> None:
    """Two processes save a tensor by rows, one by columns, one by runs, and one that the second has alone."""
    world = World("cpu", need_group=True)
    p, full = world.process, numbered((5, 6))
    boxes = {
        "rows": [rows((5, 6), *((0, 2), (2, 5))[p])],
        "columns": [columns((5, 6), *((0, 1), (1, 6))[p])],
        "runs": rectangles((5, 6), *((0, 8), (8, 30))[p]),
        "alone": [full_box((5, 6))] if p else [],
        "both": [full_box((5, 6))],
    }
    state = {"model": {name: boxed(full, places) for name, places in boxes.items()}}
    writer = StateWriter(world)
    written = writer.begin(folder, state, 3, {})
    for tensor in state["model"].values():
        for _, view in tensor.parts:
            view.zero_()
    written.result(WRITE_S)
    writer.close()
    world.barrier()


def load_boxes(_: Harness, folder: Path) -> list[tuple[int, dict[str, Tensor]]]:
    """The same tensors in other boxes, and as plain tensors; the boxes of all processes put together."""
    world = World("cpu", need_group=True)
    p, names = world.process, ("rows", "columns", "runs", "alone", "both")
    quarters = [(slice(0, 3), slice(3 * p, 3 * p + 3)), (slice(3, 5), slice(3 * p, 3 * p + 3))]
    other = {"model": {name: boxed(torch.zeros(5, 6), quarters) for name in names}}
    plain = {"model": {name: torch.zeros(5, 6) for name in names}}
    steps = [load_state(folder, world, state)[0] for state in (other, plain)]
    summed = {name: world.sum(put_together(tensor)) for name, tensor in other["model"].items()}
    return [(steps[0], summed), (steps[1], plain["model"])]


def save_with_a_hole(_: Harness, folder: Path) -> str:
    """Processes that have not all of a tensor; how that is refused."""
    world = World("cpu", need_group=True)
    writer = StateWriter(world)
    state = {"model": {"x": boxed(numbered((4, 2)), [rows((4, 2), world.process, world.process + 1)])}}
    written = writer.begin(folder, state, 0, {})
    try:
        written.result(WRITE_S)
    except OSError as error:
        return str(error)
    finally:
        writer.close()
    return ""


def exchange_with_fsdp2(harness: Harness, model: Path, folder: Path) -> tuple[Weights, Weights, dict[str, bool]]:
    """The weights of FSDP2 after a step more, and of another that has continued from boxes of its state.

    Also which tensors of the first one's own checkpoint are the same in boxes.
    """
    engine, continued = (harness.make(make_spec(model)) for _ in range(2))
    train(engine, make_sequences(1))
    first: Any = engine
    state = _full(saved_state(first._runner.named_tensors(), first._optimizer))
    save(engine, folder / "fsdp2")
    world, names = engine.world, _names(state)
    place = {name: _half(full, number, world) for number, (name, full) in enumerate(names.items())}
    read, found = _boxes(state, place, torch.zeros_like), {}
    load_state(folder / "fsdp2", world, read)
    for name, tensor in _names(read).items():
        if isinstance(tensor, BoxedTensor):
            found[name] = all(torch.equal(view, names[name][box]) for box, view in tensor.parts)
        else:
            found[name] = torch.equal(tensor, names[name])
    writer = StateWriter(world)
    writer.begin(folder / "boxes", _boxes(state, place, torch.clone), 1, {}).result(WRITE_S)
    writer.close()
    world.barrier()
    continued.load_checkpoint(folder / "boxes")
    for each in (engine, continued):
        train(each, make_sequences(2))
    return weights(engine), weights(continued), found


def _half(full: Tensor, number: int, world: World) -> list[Box]:
    """One process's boxes: half of the elements, or columns, or all, in turn."""
    shape, p = tuple(full.shape), world.process
    if number % 3 == 0 or len(shape) < 2:
        return rectangles(shape, *((0, full.numel() // 3), (full.numel() // 3, full.numel()))[p])
    if number % 3 == 1:
        middle = shape[-1] // 2
        return [(*full_box(shape[:-1]), slice(*((0, middle), (middle, shape[-1]))[p]))]
    return [full_box(shape)] if p == number % 2 else []


def _full(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _full(value) for key, value in state.items()}
    return (state.full_tensor() if isinstance(state, DTensor) else state).detach().clone()


def _names(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in state.items():
        found |= _names(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _boxes(
    state: dict[str, Any], places: dict[str, list[Box]], make: Callable[[Tensor], Tensor], prefix: str = ""
) -> dict[str, Any]:
    """A state in boxes; numbers stay plain."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        name = prefix + key
        if isinstance(value, dict):
            found[key] = _boxes(value, places, make, f"{name}.")
        else:
            found[key] = boxed(make(value), places[name]) if value.dim() else make(value)
    return found
