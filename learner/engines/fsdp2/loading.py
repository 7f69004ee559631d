"""Weights for a model that is sharded already: each rank reads its part of every tensor from the model's folder.

Invariant: in addition to its shard, a process holds what `model_files.reading` does. Master weights are float32
whatever the files hold.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rollmesh.learner.engines.fsdp2.packing_choice import refuse_by_structure
from rollmesh.learner.engines.fsdp2.preparation.recomputation import plain_name
from rollmesh.learner.model_files.location import local_folder
from rollmesh.learner.model_files.reading import read_parts, read_rows, refuse_other_twin
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.weight_files import Part, WeightFiles, full_part
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.errors import DataError


def open_model(
    section: ModelSection, device: torch.device, *, backbone_only: bool = False, longest: int | None = None
) -> StoredModel:
    """Opens a model for training.

    Args:
        section: folder or hub id.
        device: of the engine.
        backbone_only: see `StoredModel`.
        longest: tokens of the longest sequence, where it is known.

    Raises:
        DataError: see `StoredModel`; no such folder or hub id; sequences too long to compute side by side.
    """
    stored = StoredModel(local_folder(section), device, backbone_only=backbone_only)
    try:
        refuse_by_structure(stored.model.config, section.path, longest)
    except DataError:
        stored.close()
        raise
    stored.model.config.use_cache = False
    return stored


def load_weights(model: nn.Module, stored: StoredModel, device: torch.device) -> list[str]:
    """Gives memory and values to a model's parameters, and values to the buffers that are stored.

    Args:
        model: the stored one or a part of it, after `fsdp.prepare`.
        stored: open.
        device: of the parameters.

    Returns:
        Parameters for which nothing is stored: they have memory, and arbitrary values.

    Raises:
        DataError: a file cannot be read, or holds two tensors for what the model has once; perhaps on this rank alone.
    """
    _allocate(model, device)
    targets: dict[str, Tensor] = {
        plain_name(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)
    }
    targets |= {plain_name(name): tensor for name, tensor in model.named_buffers(remove_duplicate=False)}
    filled: dict[int, str] = {}
    for conversion in stored.plan.conversions:
        wanted = [name for name in conversion.results if name in targets]
        for index, part, values in read_parts(stored, conversion, [(n, _own_part(targets[n])) for n in wanted]):
            name = wanted[index]
            target = _place(targets[name], part)
            twin = filled.get(id(targets[name]))
            if twin is None:
                target.copy_(values)
            elif not torch.equal(target, values.to(target)):
                raise refuse_other_twin(stored.folder, name, twin)
        for name in wanted:
            filled.setdefault(id(targets[name]), name)
    return [plain_name(name) for name, parameter in model.named_parameters() if id(parameter) not in filled]


def fill(target: Tensor, files: WeightFiles, source: str) -> None:
    """Gives a parameter this rank's part of a stored tensor of its shape."""
    for part, values in read_rows(files, source, _own_part(target)):
        _place(target, part).copy_(values)


def place_full(target: Tensor, values: Tensor) -> None:
    """Gives a parameter this rank's part of a full tensor of its shape."""
    part = _own_part(target)
    _place(target, part).copy_(values[tuple(part)])


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Gives memory to the parameters, tied ones once."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                empty = torch.empty_like(parameter, device=device)
                made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module.register_parameter(name, made[parameter])
    # Nothing moves: FSDP2 takes over the parameters that it finds.
    nn.Module.to(model, device)


def _own_part(target: Tensor) -> Part:
    """The part of the full tensor that this rank has."""
    if not isinstance(target, DTensor):
        return full_part(target)
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def _place(target: Tensor, part: Part) -> Tensor:
    """The memory of a part of the full tensor, on this rank."""
    local = target.to_local() if isinstance(target, DTensor) else target
    starts = [own.start for own in _own_part(target)]
    place = (slice(wanted.start - start, wanted.stop - start) for wanted, start in zip(part, starts, strict=True))
    return local.detach()[tuple(place)]
