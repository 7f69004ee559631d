"""A model's tensors as FSDP2 divides them: by rows, as `torch.chunk` does, in each copy of the model.

Experts that are divided over ranks are first cut into equal runs of experts, and each of these is divided so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from rollmesh.learner.engines.fsdp2.experts.division import EXPERTS
from rollmesh.learner.engines.tensors.boxes import Box, full_box
from rollmesh.learner.engines.tensors.divided_tensor import DividedTensor, whole


def divided_tensors(named: Iterable[tuple[str, Tensor]], processes: int) -> Iterator[DividedTensor]:
    """The tensors of `ModelRunner.named_tensors`.

    Args:
        named: names and tensors. DTensors are sharded by rows over all processes, or in each copy of the model
            (`shard_mesh`). Those of divided experts are sharded over the mesh of `experts.division`. Every process has
            the others whole.
        processes: of the learner.
    """
    for name, tensor in named:
        if not isinstance(tensor, DTensor):
            yield whole(name, tensor.detach(), processes)
            continue
        runs = tensor.device_mesh.shape[-1] if EXPERTS in (tensor.device_mesh.mesh_dim_names or ()) else 1
        copies = [placement for placement in tensor.placements if isinstance(placement, Replicate)]
        # Runs make the dimension of the mesh before them a strided one.
        *divided, rows = tensor.placements[len(copies) :]
        known = (len(divided), rows) == (0 if runs == 1 else 1, Shard(0))
        assert known, f"{name} is sharded as {tensor.placements}"
        shards = tensor.device_mesh.size() // math.prod(tensor.device_mesh.shape[: len(copies)])
        local = tensor.to_local().detach()
        yield DividedTensor(
            name,
            tuple(tensor.shape),
            tensor.dtype,
            processes // shards,
            partial(_place, tuple(tensor.shape), shards, runs),
            [local] if local.numel() else [],
        )


# Layers repeat a few shapes, and each process asks for the place of every other one.
@lru_cache(1 << 16)
def _place(shape: tuple[int, ...], shards: int, runs: int, process: int) -> tuple[int, tuple[Box, ...]]:
    copy, shard = divmod(process, shards)
    part, run = divmod(shard, runs)
    rows, *rest = shape
    # Runs are equal, see `experts.division`.
    each = rows // runs
    most = -(-each // (shards // runs))
    first, last = (run * each + min(number * most, each) for number in (part, part + 1))
    return copy, ((slice(first, last), *full_box(rest)),) if first < last and 0 not in rest else ()
