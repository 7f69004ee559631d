"""A model's tensors as FSDP2 divides them: by rows, as `torch.chunk` does, in each copy of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from rollmesh.learner.engines.tensors.boxes import Box, full_box
from rollmesh.learner.engines.tensors.divided_tensor import DividedTensor, whole


def divided_tensors(named: Iterable[tuple[str, Tensor]], processes: int) -> Iterator[DividedTensor]:
    """The tensors of `ModelRunner.named_tensors`.

    Args:
        named: names and tensors. DTensors are sharded by rows over all processes, or in each copy of the model
            (`shard_mesh`); every process has the others whole.
        processes: of the learner.
    """
    for name, tensor in named:
        if not isinstance(tensor, DTensor):
            yield whole(name, tensor.detach(), processes)
            continue
        *copies, rows = tensor.placements
        known = (rows, set(copies) - {Replicate()}) == (Shard(0), set())
        assert known, f"{name} is sharded as {tensor.placements}"
        shards = tensor.device_mesh.shape[-1]
        local = tensor.to_local().detach()
        yield DividedTensor(
            name,
            tuple(tensor.shape),
            tensor.dtype,
            processes // shards,
            partial(_place, tuple(tensor.shape), shards),
            [local] if local.numel() else [],
        )


# Layers repeat a few shapes, and each process asks for the place of every other one.
@lru_cache(1 << 16)
def _place(shape: tuple[int, ...], shards: int, process: int) -> tuple[int, tuple[Box, ...]]:
    copy, shard = divmod(process, shards)
    rows, *rest = shape
    most = -(-rows // shards)
    first, last = min(shard * most, rows), min((shard + 1) * most, rows)
    return copy, ((slice(first, last), *full_box(rest)),) if first < last and 0 not in rest else ()
