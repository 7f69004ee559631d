"""The engine: one interface to hold, evaluate and update a model, whatever trains it.

Invariants: every method is collective (each rank calls it, in the same order). A rank passes its own micro-batches.
Gradients are sums over all ranks' micro-batches, so they depend neither on the split nor on the number of ranks. Tensor
names leave an engine as Hugging Face names. Engines run in one thread. Several may live in a process (actor, critic,
reference), created in the same order on every rank and closed in any order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.types import GlobalCounts, ModelOutput
from rollmesh.learner.batching.types import PackedBatch, Packing
from rollmesh.learner.engines.tolerances import Evidence
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import OptimizerSection

ACTOR = "actor"
"""The role of the policy, which every algorithm trains."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The specification from which an engine is built.

    Attributes:
        model: folder or hub id, revision, and the dtype in which weights are exported.
        optimizer: AdamW, its schedule and clipping; none: the model stays as it was loaded, has no optimizer and no
            part in checkpoints.
        total_steps: optimizer steps of the whole run (length of the schedule).
        device: `cpu` or `cuda`.
        param_dtype: compute dtype; master weights and optimizer state are float32.
        activation_checkpointing: recompute activations in the backward pass.
        seed: of weights that the folder does not hold (a new value head); the first engine of a process seeds the
            process with it too.
        entropy_gradient: the loss differentiates the entropy (language models).
        offload: between calls the weights rest in host memory (models that are not trained).
        longest: tokens of the longest sequence, prompt and response, that can come; None: not known.
    """

    model: ModelSection
    optimizer: OptimizerSection | None
    total_steps: int
    device: Literal["cpu", "cuda"] = "cpu"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = False
    seed: int = 0
    entropy_gradient: bool = False
    offload: bool = False
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step; the same on every rank.

    Attributes:
        metrics: loss, gradient norm (before clipping), learning rate, and the algorithm's metrics over the whole batch.
            Empty where no token was to be trained; weights and optimizer are unchanged then.
        skipped: True where the gradient was not finite: weights and optimizer are unchanged.
    """

    metrics: dict[str, float]
    skipped: bool


class Engine(ABC):
    """A language model or a value model, with its optimizer where it is trained, on this process's device.

    Attributes:
        rank, world_size: this process among the data-parallel ranks.
        device: where batches must be and results are.
        trained: it has an optimizer.
        packing: how it computes the sequences of a micro-batch, which are to be planned accordingly.
        vocab_size: token ids are below it.
    """

    rank: int
    world_size: int
    device: torch.device
    trained: bool
    packing: Packing
    vocab_size: int

    @abstractmethod
    def probe(self) -> Evidence:
        """Proves on a few random sequences that the model is computed right; to be called before anything is trained.

        Log-probs or values, and for a trained model the gradient, are compared with those of transformers' own code.
        It costs less than a training step and changes nothing but, where need be, `packing`.

        Returns:
            How far they are apart.

        Raises:
            DataError: they differ, on every rank.
        """

    @abstractmethod
    def train_batch(
        self,
        batches: Sequence[PackedBatch],
        loss: Loss,
        counts: GlobalCounts,
        before_update: Callable[[], None] | None = None,
    ) -> StepResult:
        """One optimizer step.

        Args:
            batches: this rank's micro-batches (ranks may have different numbers, also none).
            loss: gives each micro-batch's share of the loss. It is called with the fields of `ModelOutput` that belong
                to the kind of model, with gradient (the entropy's only with `EngineSpec.entropy_gradient`).
            counts: sizes of the whole batch over all ranks, see `global_counts`.
            before_update: called between the backward passes and the update; where it raises, nothing has changed.
        """

    @abstractmethod
    def infer_batch(self, batches: Sequence[PackedBatch], *, sum_pi_squared: bool = False) -> list[ModelOutput]:
        """The model's output for the trained tokens, per micro-batch, without gradient.

        Args:
            batches: this rank's micro-batches.
            sum_pi_squared: give that field too (language models).
        """

    @abstractmethod
    def global_counts(self, batches: Sequence[PackedBatch]) -> GlobalCounts:
        """Counts of the given micro-batches, summed over the ranks."""

    @abstractmethod
    def all_gather(self, values: Tensor) -> list[Tensor]:
        """Every rank's values, in the order of the ranks.

        Args:
            values: [N], of one dtype on all ranks; N may differ and may be 0.
        """

    @abstractmethod
    def broadcast(self, values: Tensor) -> Tensor:
        """Rank 0's values, on every rank's device.

        Args:
            values: of one shape and dtype on all ranks; only rank 0's are read.
        """

    @abstractmethod
    def export_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their Hugging Face names, on the CPU, in the order of the model, tied ones once.

        On rank 0; the other ranks exhaust the iterator too, which gives them nothing. It never holds the full model.
        Tensors may share memory with the model or with one another: copy those that must outlive the next one.

        Args:
            dtype: dtype of floating-point tensors; none: the model section's.
        """

    @abstractmethod
    def save_checkpoint(self, folder: Path, extra: dict[str, object]) -> None:
        """Writes model, optimizer, schedule, random state and `extra` (JSON) into an empty folder. Not atomic.

        A rank returns when its own part is written; `learner.checkpoint.CheckpointStore` waits for all.

        Raises:
            OSError: the disk refuses; perhaps on this rank alone.
        """

    @abstractmethod
    def load_checkpoint(self, folder: Path) -> dict[str, object]:
        """Restores what `save_checkpoint` wrote, at any number of ranks; gives back `extra`."""

    @abstractmethod
    def gather_bytes(self, message: bytes) -> list[bytes]:
        """Every rank's message, in the order of the ranks; they may differ in length and be empty."""

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
        """Frees the engine's memory; the engine is of no use afterwards."""
