"""Weights for a process's Megatron tensors, read from the model's folder: its own boxes, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from rollmesh.learner.engines.megatron.weight_rules import Piece, Pieces
from rollmesh.learner.engines.megatron.weights.weight_map import ParameterKey
from rollmesh.learner.engines.tensors.boxes import box_shape
from rollmesh.learner.model_files.conversion import Conversion
from rollmesh.learner.model_files.reading import read_parts, refuse_other_twin
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.value_head import HEAD, stored_head
from rollmesh.learner.model_files.weight_files import full_part

Key = TypeVar("Key")
_Maker = tuple[str, Conversion]
"""A conversion, and the name of its result."""


def load_weights(
    parameters: Mapping[ParameterKey, Tensor],
    wanted: Mapping[ParameterKey, Pieces],
    stored: StoredModel,
    note: Callable[[ParameterKey, Piece, Tensor], None] | None = None,
) -> None:
    """Gives values to a process's tensors; padding becomes 0.

    Args:
        parameters: of this process, of any dtype and on any device.
        wanted: the pieces of each.
        stored: open.
        note: told what is read, as `read_pieces` yields it.

    Raises:
        DataError: see `read_pieces`.
    """
    for key, parameter in parameters.items():
        if wanted[key].padded:
            parameter.detach().zero_()
    for key, piece, values in read_pieces(stored, wanted):
        piece.view(parameters[key]).copy_(values)
        if note is not None:
            note(key, piece, values)


def read_pieces(stored: StoredModel, wanted: Mapping[Key, Pieces]) -> Iterator[tuple[Key, Piece, Tensor]]:
    """The values of local tensors, piece by piece.

    Args:
        stored: open.
        wanted: local tensors by a key of the caller's choice.

    Yields:
        The key, a piece, or some rows of one, and its values in the shape of its `hf_box`. They are in the stored
        dtype, on the CPU. Padding is in no piece. A head that is not stored is 0.

    Raises:
        DataError: a file cannot be read, or holds two tensors for what the model has once; perhaps on this rank alone.
    """
    asked: dict[str, list[tuple[Key, Piece]]] = {}
    for key, found in wanted.items():
        for piece in found.pieces:
            asked.setdefault(piece.hf_name, []).append((key, piece))
    for name in [name for name in asked if name.startswith(f"{HEAD}.")]:
        for key, piece in asked.pop(name):
            yield key, piece, _head(stored, piece)
    makers = _makers(stored)
    for conversion in stored.plan.conversions:
        own = [
            (name, *request)
            for name, requests in asked.items()
            if makers[name][0][1] is conversion
            for request in requests
        ]
        for index, box, values in read_parts(
            stored, conversion, [(makers[name][0][0], piece.hf_box) for name, _, piece in own]
        ):
            name, key, piece = own[index]
            rows = piece.rows(box)
            _check_twins(stored, makers[name], rows, values)
            yield key, rows, values


def _makers(stored: StoredModel) -> dict[str, list[_Maker]]:
    """The conversions that make each parameter; more than one where tied ones are stored more than once.

    The first is that of the name which the parameter has in the model, where there is one.
    """
    names = {id(parameter): name for name, parameter in stored.model.named_parameters()}
    state = stored.model.state_dict(keep_vars=True)
    makers: dict[str, list[_Maker]] = {}
    for conversion in stored.plan.conversions:
        for result in conversion.results:
            if (name := names.get(id(state.get(result)))) is not None:
                makers.setdefault(name, []).insert(0 if result == name else len(makers[name]), (result, conversion))
    return makers


def _check_twins(stored: StoredModel, makers: list[_Maker], piece: Piece, values: Tensor) -> None:
    """Refuses a tied tensor that is stored twice, with two values; a model without an output layer has but one."""
    if stored.backbone_only:
        return
    (own, _), *twins = makers
    for twin, conversion in twins:
        found = [other for *_, other in read_parts(stored, conversion, [(twin, piece.hf_box)])]
        if not torch.equal(torch.cat(found).float(), values.float()):
            raise refuse_other_twin(stored.folder, own, twin)


def _head(stored: StoredModel, piece: Piece) -> Tensor:
    source = stored_head(stored.files, piece.hf_name, piece.shape)
    if source is None:
        return torch.zeros(box_shape(piece.hf_box))
    return stored.files.read(source, full_part(stored.files.stored[source]))
