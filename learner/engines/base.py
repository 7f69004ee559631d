"""The engine: one interface to hold, evaluate and update a model, whatever trains it.

Invariants: every method is collective (each rank calls it, in the same order); a rank passes its own micro-batches;
gradients are sums over all ranks' micro-batches, so they depend neither on the split nor on the number of ranks.
Tensor names leave an engine as Hugging Face names. Engines run in one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.types import GlobalCounts, LossOutput, TokenBatch
from learner.batching.types import PackedBatch
from mesh.config.models import ModelSection, OptimizerSection

LossFunction = Callable[[Tensor, Tensor, TokenBatch, GlobalCounts], LossOutput]
"""(log_probs [R] with gradient, entropy [R], tokens, global counts) -> this micro-batch's share; `Algorithm.loss`."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is built from.

    Attributes:
        model: folder or hub id, revision, and the dtype in which weights are exported.
        optimizer: AdamW, its schedule and clipping.
        total_steps: optimizer steps of the whole run (length of the schedule).
        device: `cpu` or `cuda`.
        param_dtype: compute dtype; master weights and optimizer state are float32.
        activation_checkpointing: recompute activations in the backward pass.
        seed: seeds the engine's random state.
    """

    model: ModelSection
    optimizer: OptimizerSection
    total_steps: int
    device: Literal["cpu", "cuda"] = "cpu"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did; the same on every rank.

    Attributes:
        metrics: loss, gradient norm (before clipping), learning rate, and the algorithm's metrics over the whole batch.
        skipped: True where the gradient was not finite: weights and optimizer are unchanged.
    """

    metrics: dict[str, float]
    skipped: bool


class Engine(ABC):
    """A language model with its optimizer on this process's device."""

    rank: int
    world_size: int
    device: torch.device

    @abstractmethod
    def train_batch(
        self,
        batches: Sequence[PackedBatch],
        loss: LossFunction,
        counts: GlobalCounts,
        before_update: Callable[[], None] | None = None,
    ) -> StepResult:
        """One optimizer step.

        Args:
            batches: this rank's micro-batches (ranks may have different numbers, also none).
            loss: gives each micro-batch's share of the loss.
            counts: sizes of the whole batch over all ranks, see `global_counts`.
            before_update: called between the backward passes and the update; where it raises, nothing has changed.
        """

    @abstractmethod
    def infer_batch(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Log-probs of the trained tokens, float32 [R] per micro-batch, without gradient."""

    @abstractmethod
    def global_counts(self, batches: Sequence[PackedBatch]) -> GlobalCounts:
        """Counts of the given micro-batches, summed over the ranks."""

    @abstractmethod
    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their Hugging Face names, on the CPU, in the order of the model, tied ones once.

        Tensors may share memory with the model while the iterator stands: copy what must outlive the next step.

        Args:
            dtype: dtype of floating-point tensors; none: the model section's.
        """

    @abstractmethod
    def save_checkpoint(self, folder: Path, extra: dict[str, object]) -> None:
        """Writes model, optimizer, schedule, random state and `extra` (JSON) into an empty folder. Not atomic.

        `learner.checkpoint.CheckpointStore` makes it atomic and keeps the newest.
        """

    @abstractmethod
    def load_checkpoint(self, folder: Path) -> dict[str, object]:
        """Restores what `save_checkpoint` wrote, at any number of ranks; gives back `extra`."""

    @abstractmethod
    def barrier(self) -> None:
        """Waits until every rank is here."""

    @abstractmethod
    def export_hf(self, folder: Path) -> None:
        """Writes a Hugging Face folder (configuration, safetensors, tokenizer) that `transformers` loads."""

    @abstractmethod
    def offload(self) -> None:
        """Moves model and optimizer state to host memory."""

    @abstractmethod
    def onload(self) -> None:
        """Brings them back to the device."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the engine holds; it is of no use afterwards."""


@dataclass(frozen=True, slots=True)
class RoleBatch:
    """A batch with the engines that can look at it: what `Algorithm.batch_stage` is given.

    Attributes:
        batches: this rank's micro-batches.
        roles: engine by role name.
    """

    batches: Sequence[PackedBatch]
    roles: Mapping[str, Engine]

    @property
    def tokens(self) -> list[TokenBatch]:
        """The trained tokens of every micro-batch."""
        return [batch.tokens for batch in self.batches]

    def log_probs(self, role: str) -> list[Tensor]:
        """Log-probs under a role's policy as it is now, float32 [R] per micro-batch."""
        return self.roles[role].infer_batch(self.batches)
