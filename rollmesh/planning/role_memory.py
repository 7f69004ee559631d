"""One of the learner's models on one rank, whichever engine trains it: its settings, and the moments of its memory.

Each engine has formulas of its own, in `fsdp_memory` and `megatron`. A phase is the moment of its largest sum.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from rollmesh.learner.engines.offload import SLAB_BYTES
from rollmesh.planning.shape import ModelShape

MASTER = 4
"""Bytes of an element of master weights, gradients and whatever else is float32."""

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
GATHERED, REDUCTION = "gathered parameters", "unsharded gradients"
ACTIVATIONS, LOGITS = "activations", "logits"
FRESH = "fresh gradients"
INFERENCE, UPDATE = "inference", "optimizer"
"""Phases without a backward pass."""

COMPONENTS = (PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, REDUCTION, FRESH, ACTIVATIONS, LOGITS)


@dataclass(frozen=True, slots=True)
class Phase:
    """A moment of a step: bytes by component."""

    name: str
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class LogitRoom:
    """The memory for logits, as `learner/engines/output/layer.py` takes it.

    Attributes:
        kept: bytes of float32 logits that may stay until the backward pass.
        tile: elements of a tile.
        rows: tokens of a tile at most.
    """

    kept: int
    tile: int
    rows: int

    def tiles(self, tokens: int, vocabulary: int, hidden: int, compute_bytes: int, *, gradient: bool) -> int:
        """Bytes at the output layer where logits are computed tile by tile.

        Args:
            tokens: whose logits are computed; every token may be a trained one.
            vocabulary: columns of this process.
            hidden: width of the hidden states.
            compute_bytes: of an element of the compute dtype.
            gradient: in a backward pass.
        """
        rows = min(self.rows, tokens)
        columns = min(vocabulary, self.tile // rows)
        tile = MASTER * rows * columns
        # A product of bfloat16 exists in addition to the tile that it is copied into.
        product = 0 if compute_bytes == MASTER else tile
        if not gradient:
            return 2 * tile + product
        kept = MASTER * tokens * vocabulary
        kept = kept if kept <= self.kept else 0
        # The gradients of hidden states and of a tile's weights are summed in float32.
        sums = MASTER * hidden * (tokens + columns)
        # A tile's gradient is rounded, and its product with states or weights added to a sum.
        rounded = 2 * rows * columns + MASTER * hidden * max(rows, columns) if product else 0
        return 2 * tile + sums + max(rounded, 0 if kept else product) + kept


@dataclass(frozen=True, slots=True)
class Moments:
    """Bytes of an optimizer's state for each parameter: of matrices in blocks, and of all else."""

    matrices: int = 2 * MASTER
    rest: int = 2 * MASTER


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSetup(ABC):
    """A model of the learner, and the way in which it is trained.

    Attributes:
        name: of the role.
        shape: of the model.
        trained: it has gradients and an optimizer.
        compute_bytes: of an element of the compute dtype.
        recompute: blocks keep their input alone for the backward pass; `selective`: and what costs most to compute.
        offload: its parameters rest in host memory between its uses.
        offload_optimizer: the optimizer's state too.
        offload_gradients: its gradients too, between the backward passes and the optimizer's step.
        tokens: of a micro-batch, those of this rank alone where several divide it.
        micro_batches: of an optimizer step.
        logits: room for them.
        moments: of the optimizer.
    """

    name: str
    shape: ModelShape
    trained: bool
    compute_bytes: int
    recompute: bool | Literal["selective"]
    offload: bool
    tokens: int
    micro_batches: int
    logits: LogitRoom
    moments: Moments = Moments()
    offload_optimizer: bool = False
    offload_gradients: bool = False

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Bytes of this rank's parameters, with masters where these are the parameters themselves."""

    @property
    @abstractmethod
    def gradients(self) -> int:
        """Bytes of this rank's gradients when a backward pass has ended."""

    @property
    @abstractmethod
    def optimizer(self) -> int:
        """Bytes of this rank's optimizer state, with masters that are not the parameters themselves."""

    @property
    @abstractmethod
    def staged(self) -> int:
        """Bytes of host memory for the copy from which a checkpoint is written; kept from one to the next."""

    @property
    @abstractmethod
    def inputs_on_host(self) -> int:
        """Bytes of host memory for inputs of blocks that wait for a backward pass; kept for any role's next pass."""

    @property
    @abstractmethod
    def parts(self) -> int:
        """Ranks that divide the tokens of a micro-batch."""

    @property
    @abstractmethod
    def division(self) -> str:
        """The division over ranks, in words."""

    @abstractmethod
    def division_json(self) -> dict[str, Any]:
        """The division over ranks, with its engine, for programs."""

    @abstractmethod
    def phases(self) -> Iterator[Phase]:
        """The phases of a role's use, its own resting parts included."""

    @property
    def on_host(self) -> int:
        """Bytes of host memory for what is not on the device all the time; kept by the engine until the next time."""
        optimizer = self.optimizer if self.offload_optimizer else 0
        gradients = self.gradients if self.offload_gradients else 0
        return self.parameters * self.offload + (optimizer + gradients) * self.trained

    @property
    def away_in_turns(self) -> int:
        """Bytes of host memory for what is on the device in the learner's turn alone, in slabs of pinned memory."""
        parts = [0 if self.offload else self.parameters, sum(self.state_on_device.values())]
        return sum(math.ceil(part / SLAB_BYTES) * SLAB_BYTES for part in parts)

    def resting(self) -> dict[str, int]:
        """Components between the uses of a role; a step ends without gradients."""
        return ({} if self.offload else {PARAMETERS: self.parameters}) | self.state_on_device

    @property
    def in_use(self) -> dict[str, int]:
        """Components while it computes, without gradients."""
        return {PARAMETERS: self.parameters} | self.state_on_device

    @property
    def state_on_device(self) -> dict[str, int]:
        """The optimizer's state, where it stays on the device."""
        return {OPTIMIZER: self.optimizer} if self.trained and not self.offload_optimizer else {}
