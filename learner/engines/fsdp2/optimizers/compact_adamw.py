"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) that keeps its moments in fewer bits than it computes in.

A step computes in float32. Moments are rounded stochastically when they are stored: to the nearest number, a second
moment that changes by a thousandth per step would never change. Expectations are then those of float32.

Invariants: the random numbers of a step follow from its number, and the parameter's and the shard's places. So copies
of a shard stay the same, and a resumed run continues bit by bit on as many shards. Torch's generators are not drawn
from. A row is kept in a way that depends on that row alone, so any number of ranks can read it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

# Elements that are computed at a time: a step also needs up to 52 bytes for each of this many, 210 MiB.
_PIECE = 1 << 22
_STEP = "step"


class CompactAdamW(Optimizer):
    """The step; how moments are kept is left to the classes below.

    Args:
        params: groups of float32 parameters, sharded by rows or not.
        lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @abstractmethod
    def _begin(self, parameter: Tensor) -> dict[str, Tensor]:
        """Moments of zero by name, as they are kept; sharded as the parameter is, by rows."""

    @abstractmethod
    def _read(self, kept: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """First and second moment of some rows, float32 [rows, width], in memory of their own."""

    @abstractmethod
    def _write(self, kept: dict[str, Tensor], first: Tensor, second: Tensor, generator: torch.Generator) -> None:
        """Stores moments of some rows, and may overwrite its arguments."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # gives no loss
        """Updates every parameter that has a gradient; closures are not supported."""
        assert closure is None
        places = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        for place, (group, parameter) in enumerate(places):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state[_STEP] = torch.zeros(())
                state.update(self._begin(parameter))
            state[_STEP] += 1
            number = int(state[_STEP])
            names = [name for name in state if name != _STEP]
            rows = [_rows(tensor) for tensor in (parameter, parameter.grad, *(state[name] for name in names))]
            generator = torch.Generator(rows[0].device)
            generator.manual_seed(hash((number, place, _shard_of(parameter))))
            for values, gradient, *moments in _pieces(rows):
                kept = dict(zip(names, moments, strict=True))
                self._write(kept, *_update(group, number, values, gradient, *self._read(kept)), generator)

    def load_state_dict(self, state_dict: Any) -> None:
        """Restores a state. Torch would make its moments float32, four times the memory of those in 8 bits."""
        groups, states = state_dict["param_groups"], state_dict["state"]
        super().load_state_dict({"param_groups": groups, "state": {}})
        numbers = [number for group in groups for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if loaded := states.get(number):
                kinds = {name: tensor.dtype for name, tensor in self._begin(parameter).items()}
                moments = {name: loaded[name].to(parameter.device, dtype) for name, dtype in kinds.items()}
                self.state[parameter] = {_STEP: loaded[_STEP], **moments}


def _update(
    group: dict[str, Any], step: int, parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor
) -> tuple[Tensor, Tensor]:
    """Updates some rows of a parameter and their moments, in place."""
    (beta1, beta2), rate = group["betas"], group["lr"]
    first.lerp_(gradient, 1.0 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    divisor = (second / (1.0 - beta2**step)).sqrt_().add_(group["eps"])
    parameter.mul_(1.0 - rate * group["weight_decay"]).addcdiv_(first, divisor, value=-rate / (1.0 - beta1**step))
    return first, second


def _rows(tensor: Tensor) -> Tensor:
    """This rank's part, as a matrix."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.flatten(1) if local.dim() > 1 else local.view(-1, 1)


def _pieces(rows: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Views of some rows of each matrix; of some columns of one row, where that is longer than a piece.

    Args:
        rows: matrices of as many rows; one may have a column for several of the first one's, which divide a piece.
    """
    width = rows[0].shape[1]
    count = max(1, _PIECE // max(1, width))
    for piece in zip(*(tensor.split(count) for tensor in rows), strict=True):
        if width <= _PIECE:
            yield piece
        else:
            columns = (_PIECE // -(-width // part.shape[1]) for part in piece)
            yield from zip(*(part.split(most, 1) for part, most in zip(piece, columns, strict=True)), strict=True)


def _shard_of(tensor: Tensor) -> int:
    """The number of this rank's shard."""
    if not isinstance(tensor, DTensor):
        return 0
    (dimension,) = (i for i, placement in enumerate(tensor.placements) if isinstance(placement, Shard))
    return tensor.device_mesh.get_local_rank(dimension)
