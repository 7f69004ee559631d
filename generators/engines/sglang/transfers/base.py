"""What a way of transferring weights has to do.

Invariants: what is staged is complete, of the model's names and shapes, and in the server's dtype, before anything of
the server is touched; staged memory is given back exactly once, by `discard`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from rollmesh.generators.engines.sglang.http_client import RefusedError
from rollmesh.mesh.errors import WeightsError

if TYPE_CHECKING:
    from rollmesh.generators.engines.sglang.http_client import Client

# An update moves all bytes of a model; the server is watched meanwhile.
UPDATE_S = 600.0
# The dtype in which a tensor is sent.
DtypeOf = Callable[[torch.Tensor], torch.dtype]


class Staged(ABC):
    """A complete set of weights, ready to be loaded."""

    @abstractmethod
    def discard(self) -> None:
        """Gives its memory back; any thread, twice is as good as once."""


async def begin(client: Client) -> None:
    """Opens the server's session of an update.

    Raises:
        WeightsError: it does not open one; nothing has changed.
    """
    try:
        await client.post("/begin_weight_update")
    except RefusedError as error:
        raise WeightsError(
            f"no update of the weights can begin: {error}", hint="does somebody else load weights into the server?"
        ) from error


class Transfer(ABC):
    """One way."""

    @abstractmethod
    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Staged:
        """Puts checked tensors where the server will find them; in a caller's thread.

        Raises:
            WeightsError: there is no room for them.
        """

    @abstractmethod
    async def load(self, client: Client, staged: Any, label: str) -> None:
        """Makes the server take them, under this label, while it is paused.

        Raises:
            WeightsError: it did not, and still has the former weights.
            EngineError: it did not; nobody knows what it holds now.
        """

    async def close(self) -> None:  # noqa: B027  # most have nothing to give back
        """Gives back what was kept from one update to the next."""
