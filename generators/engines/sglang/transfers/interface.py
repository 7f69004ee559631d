"""The interface of a transfer of weights.

Invariants: staged weights are complete, of the model's names and shapes, and in the server's dtype, before anything of
the server is touched. Staged memory is released exactly once, by `discard`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from rollmesh.generators.engines.sglang.http_client import RefusedError
from rollmesh.mesh.errors import WeightsError

if TYPE_CHECKING:
    from rollmesh.generators.engines.sglang.http_client import HttpClient

# An update moves all bytes of a model; the server is watched meanwhile.
UPDATE_S = 600.0
# The dtype in which a tensor is sent.
DtypeOf = Callable[[torch.Tensor], torch.dtype]


class StagedWeights(ABC):
    """A complete set of weights, ready to be loaded."""

    @abstractmethod
    def discard(self) -> None:
        """Gives its memory back; any thread, and a second call does nothing."""


async def begin(client: HttpClient) -> None:
    """Opens the server's session of an update.

    Raises:
        WeightsError: it does not open one; nothing has changed.
    """
    try:
        await client.post("/begin_weight_update")
    except RefusedError as error:
        raise WeightsError(
            f"no update of the weights can begin: {error}", hint="does another program load weights into the server?"
        ) from error


class ServerTransfer(ABC):
    """A way of transferring weights to a server."""

    @abstractmethod
    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """Puts checked tensors where the server will find them; in a caller's thread.

        Raises:
            WeightsError: there is no room for them.
        """

    @abstractmethod
    async def load(self, client: HttpClient, staged: Any, label: str) -> None:
        """Makes the server take them, under this label, while it is paused.

        Raises:
            WeightsError: it did not, and still has the former weights.
            EngineError: it did not; it is unknown what it holds now.
        """

    async def close(self) -> None:  # noqa: B027  # most have nothing to give back
        """Gives back resources that were kept from one update to the next."""
