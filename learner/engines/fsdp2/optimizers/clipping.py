"""The norm of a whole gradient, and clipping to it, where parameters are sharded over different meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> float:
    """Scales gradients, in place, so that their norm is at most this; returns the norm before; collective.

    Args:
        parameters: those without a gradient are passed over.
        most: of the norm of all gradients together.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = global_norm(gradients)
    scale = torch.clamp(most / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([_local(gradient) for gradient in gradients], scale)
    return float(norm)


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of whole gradients, 0-d, the same in all ranks; collective.

    Args:
        gradients: of any meshes that all ranks are in.
    """
    if len({mesh_of(gradient) for gradient in gradients}) < 2:
        norm = torch.nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    # One sum over all ranks: sums along one dimension of a mesh after the other may differ from rank to rank.
    norms = torch._foreach_norm([_local(gradient) for gradient in gradients])
    copies = torch.tensor([_copies(gradient) for gradient in gradients], device=norms[0].device)
    total = (torch.stack(norms).square() / copies).sum()
    dist.all_reduce(total)
    return total.sqrt()


def mesh_of(tensor: Tensor) -> object:
    """The mesh over which a tensor is sharded; None: it is not."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(gradient: Tensor) -> int:
    """Ranks that hold the same part of it."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size()
    sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if isinstance(placement, Replicate))
