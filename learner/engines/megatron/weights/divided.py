"""A model's full tensors as Megatron's processes hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rollmesh.learner.engines.megatron.parallel import ParallelPlace, ParallelSizes
from rollmesh.learner.engines.megatron.weights.weight_map import ParameterKey, WeightMap
from rollmesh.learner.engines.tensors.boxes import Box
from rollmesh.learner.engines.tensors.divided_tensor import DividedTensor


def divided_tensors(
    weights: WeightMap,
    sizes: ParallelSizes,
    own: ParallelPlace,
    parameters: Mapping[ParameterKey, Tensor],
    dtype: torch.dtype,
) -> list[DividedTensor]:
    """Full tensors in the order of the Hugging Face model; good as long as the parameters keep their storages.

    Args:
        weights: of the model.
        sizes: of the divisions.
        own: the place of this process.
        parameters: of this process.
        dtype: of the parameters.
    """
    places = [sizes.place_of(process) for process in range(sizes.processes)]

    def place(name: str) -> Callable[[int], tuple[int, Sequence[Box]]]:
        return lambda process: (weights.copy_of(name, places[process]), weights.boxes(name, places[process]))

    return [
        DividedTensor(
            full.name,
            full.shape,
            dtype,
            weights.copies(full.name),
            place(full.name),
            weights.local_views(full.name, own, parameters),
        )
        for full in weights.full_tensors()
    ]
