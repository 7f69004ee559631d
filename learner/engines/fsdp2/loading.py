"""Weights for a model that is sharded already: each rank reads its part of every tensor from the model's folder.

Invariant: in addition to its shard, a process holds one piece of `PIECE_BYTES`. Stored tensors that must be converted
are held for one conversion at a time, with the copies that it makes. Those are this rank's experts of a layer, or one
whole tensor. Master weights are float32 whatever the files hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rollmesh.learner.engines.fsdp2.packing_choice import refuse_by_structure
from rollmesh.learner.engines.fsdp2.preparation.recomputation import plain_name
from rollmesh.learner.model_files.conversion import Conversion
from rollmesh.learner.model_files.location import local_folder
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.weight_files import Part, WeightFiles, full_part, pieces
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.errors import DataError

PIECE_BYTES = 64 << 20
"""Bytes that are read at a time; more only where a single row has more."""


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
        wanted = {name: targets[name] for name in conversion.results if name in targets}
        for name, part, values in _parts(conversion, stored, wanted):
            target = _place(targets[name], part)
            twin = filled.get(id(targets[name]))
            if twin is None:
                target.copy_(values)
            elif not torch.equal(target, values.to(target)):
                raise DataError(
                    f"model {stored.folder} holds different values for {name} and {twin}, which its config.json ties",
                    hint="set tie_word_embeddings: false in its config.json, and they are two",
                )
        for name, tensor in wanted.items():
            filled.setdefault(id(tensor), name)
    return [plain_name(name) for name, parameter in model.named_parameters() if id(parameter) not in filled]


def fill(target: Tensor, files: WeightFiles, source: str) -> None:
    """Gives a parameter this rank's part of a stored tensor of its shape."""
    for part, values in _pieces(target, files, source):
        _place(target, part).copy_(values)


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


def _parts(
    conversion: Conversion, stored: StoredModel, wanted: Mapping[str, Tensor]
) -> Iterator[tuple[str, Part, Tensor]]:
    """This rank's part of each wanted result, at once or in pieces: name, place in the full tensor, values."""
    if not wanted:
        return
    if conversion.converter is None:
        ((name, target),) = wanted.items()
        for part, values in _pieces(target, stored.files, conversion.sources[0][0]):
            yield name, part, values
        return
    sources, own = conversion.sources, {name: _own_part(target) for name, target in wanted.items()}
    if conversion.is_by_expert:
        ((experts, *_),) = own.values()
        sources = conversion.of_experts(experts.start, experts.stop)
    if not sources:
        return
    shapes = stored.files.stored
    made = conversion.apply(stored.model, ((s, stored.files.read(s[0], full_part(shapes[s[0]]))) for s in sources))
    for name, part in own.items():
        rows = slice(None) if conversion.is_by_expert else part[0]
        yield name, part, made[name][(rows, *part[1:])]


def _pieces(target: Tensor, files: WeightFiles, source: str) -> Iterator[tuple[Part, Tensor]]:
    for part in pieces(_own_part(target), files.stored[source].itemsize, PIECE_BYTES):
        yield part, files.read(source, part)


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
