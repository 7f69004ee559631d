"""The optimizer's step piece by piece, where its state rests in host memory.

Optimizers pass over parameters without a gradient. So a piece is updated by the optimizer's own step, while all other
gradients are taken away. On CUDA copies have their own stream: while a piece is computed, the one before returns to the
host, and the next one arrives.

Invariants: two pieces at most are on the device amid a step. The results are those of a step over all parameters, bit
by bit. All ranks have the same pieces, so collectives of an optimizer line up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rollmesh.learner.engines.offload import HostCopy


class PiecewiseState:
    """An optimizer's state in pieces, each of them on the device or in host memory.

    Args:
        optimizer: of the parameters.
        pieces: each trained parameter in one of them, in an order that all ranks share.
        device: of the parameters.
        folder: see `HostCopy`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pieces: Iterable[Sequence[nn.Parameter]],
        device: torch.device,
        folder: Path | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._pieces = [(piece, HostCopy(device, folder)) for piece in pieces]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def moved(self) -> bool:
        """Some of the state is on the host."""
        return any(copy.moved for _, copy in self._pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of the state that are on the host."""
        return sum(copy.nbytes for _, copy in self._pieces)

    def to_host(self) -> None:
        """Moves the whole state to the host."""
        for piece, copy in self._pieces:
            copy.to_host(self._tensors(piece))

    def to_device(self) -> None:
        """Brings the whole state back."""
        for _, copy in self._pieces:
            copy.to_device()

    def step(self) -> None:
        """Updates all parameters that have a gradient; their gradients are gone then, and the state is on the host."""
        copies = _Copies(self._stream)
        gradients = [[parameter.grad for parameter in piece] for piece, _ in self._pieces]
        for piece, _ in self._pieces:
            _give(piece, [None] * len(piece))
        copies.bring(self._pieces[0][1])
        for number, (piece, copy) in enumerate(self._pieces):
            copies.await_last()
            if number + 1 < len(self._pieces):
                copies.bring(self._pieces[number + 1][1])
            _give(piece, gradients[number])
            self._optimizer.step()
            _give(piece, [None] * len(piece))
            gradients[number] = []
            copies.send(copy, self._tensors(piece))
        copies.finish()

    def _tensors(self, piece: Sequence[nn.Parameter]) -> list[Tensor]:
        states = (self._optimizer.state.get(parameter, {}) for parameter in piece)
        # Single numbers stay: each would be a copy of its own, and gives back nothing.
        return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim()]


def pieces_of(model: nn.Module, blocks: Iterable[nn.Module]) -> list[list[nn.Parameter]]:
    """The trained parameters, those of a block together, every other one by itself; in the order of the model.

    Args:
        model: sharded, or not.
        blocks: its layers.
    """
    owners = {id(parameter): number for number, block in enumerate(blocks) for parameter in block.parameters()}
    pieces: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            pieces.setdefault(owners.get(id(parameter), parameter), []).append(parameter)
    return list(pieces.values())


class _Copies:
    """Copies of pieces, in the order in which they are asked for; on CUDA in parallel to the stream that computes.

    Memory that comes is of the copies' stream, and goes in its order. So what one piece gives back is the room of the
    next but one, without a wait of the host.

    Args:
        stream: of the copies; None: there are no streams.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream: Any = stream
        self._computing: Any = None
        self._came: Any = None
        self._brought: set[int] = set()
        if stream is not None:
            self._computing = torch.cuda.current_stream(stream.device)
            # After copies of another time, and after what made the gradients.
            stream.wait_stream(self._computing)

    def bring(self, copy: HostCopy) -> None:
        """Has a piece come to the device, if it is not there."""
        if copy.moved:
            self._brought.add(id(copy))
            with self._aside():
                copy.to_device()
        if self._stream is not None:
            self._came = self._stream.record_event()

    def await_last(self) -> None:
        """Lets what is computed next wait for the last piece that was brought."""
        if self._came is not None:
            self._computing.wait_event(self._came)

    def send(self, copy: HostCopy, tensors: Sequence[Tensor]) -> None:
        """Sends a piece to the host, after what is computed so far."""
        if id(copy) not in self._brought:
            # Made by this step: memory of the stream that computes.
            copy.to_host(tensors)
            return
        if self._stream is not None:
            self._stream.wait_stream(self._computing)
        with self._aside():
            copy.to_host(tensors)

    def finish(self) -> None:
        """Lets what is computed next wait for all copies."""
        if self._stream is not None:
            self._computing.wait_stream(self._stream)

    def _aside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _give(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
