"""The engine: one interface to hold, evaluate and update a model, whatever trains it and however it is divided.

Invariants: every method is collective, but for `discard`, `exported_tensors` and `exported_shards`: each process calls
it, in the same order. A process passes the micro-batches of its data-parallel rank (`Layout.dp_rank`). Gradients are
sums over all micro-batches of all ranks, so they depend neither on the split nor on the layout. Between `apply` and the
next `accumulate` an engine has no gradients, so nothing of a batch that was given up is in a checkpoint. Tensor names
leave an engine as Hugging Face names. Engines run in one thread. Several may live in a process (actor, critic,
reference), created in the same order in every process and closed in any order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.types import GlobalCounts, ModelOutput
from rollmesh.learner.batching.types import PackedBatch, Packing
from rollmesh.learner.engines.layout import Layout
from rollmesh.learner.engines.model_cost import ModelCost
from rollmesh.learner.engines.schedule import RunStep
from rollmesh.learner.engines.tolerances import Evidence
from rollmesh.learner.engines.world import World
from rollmesh.mesh.config.inputs import ModelSection
from rollmesh.mesh.config.learner import AttentionName, MemorySection, OptimizerSection
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.config.parallel import MegatronSection, ParallelSection, RouterSection

STATE_NAME = "state.json"
"""File that every engine writes into a checkpoint, next to its tensors: JSON, with the caller's `extra` in it."""
ACTOR = "actor"
"""The role of the policy, which every algorithm trains."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The specification from which an engine is built.

    Attributes:
        model: folder or hub id, revision, and the dtype in which weights are exported.
        optimizer: with its schedule and clipping; none: the model stays as it was loaded, has no optimizer and no
            part in checkpoints.
        total_steps: length of the schedule where `apply` is given no step of a run.
        device: `cpu` or `cuda`.
        param_dtype: compute dtype; master weights and optimizer state are float32.
        float32_logits: logits are not rounded to the compute dtype; the output layer's weights are (language models).
        attention: kernel of packed attention.
        activation_checkpointing: recompute activations in the backward pass; `selective`: all but the outputs of
            products and of attention.
        compile: layers are compiled (`torch.compile`).
        seed: of weights that the folder does not hold (a new value head); the first engine of a process seeds the
            process with it too.
        entropy_gradient: the loss differentiates the entropy (language models).
        head_bias: values have a constant term; false: they are linear in the hidden state (value models).
        sync_once: gradients travel between ranks once per `accumulate`; until then they stay on this device, whole and
            in float32. Else they travel after each micro-batch, and each rank keeps its shard of the sum.
        memory: switches between memory and time.
        parallel: how the model and its batches are divided over the processes; an engine refuses what it cannot divide.
        megatron: settings of that engine alone; others do not read them.
        router: how routers of models with experts are used; the default: they choose, and nothing is added.
        lora: adapters are trained, and the model itself stays as it was loaded; None: the whole model is trained.
        frozen: parts of the model that stay as they were loaded, by the last parts of their modules' names.
        offload: between calls the weights rest in host memory (models that are not trained).
        rest_folder: what rests is written to files in it, where the device is a CPU; None: it stays in memory.
        longest: tokens of the longest sequence, prompt and response, that can come; None: not known.
        timeout_s: longest wait of processes for one of them, in a collective.
        peak_tflops: as `Engine.peak_tflops`.
    """

    model: ModelSection
    optimizer: OptimizerSection | None
    total_steps: int
    device: Literal["cpu", "cuda"] = "cpu"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    float32_logits: bool = True
    attention: AttentionName = "auto"
    activation_checkpointing: bool | Literal["selective"] = False
    compile: bool = False
    seed: int = 0
    entropy_gradient: bool = False
    head_bias: bool = True
    sync_once: bool = False
    memory: MemorySection = field(default_factory=MemorySection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    megatron: MegatronSection = field(default_factory=MegatronSection)
    router: RouterSection = field(default_factory=RouterSection)
    lora: LoraSection | None = None
    frozen: tuple[str, ...] = ()
    offload: bool = False
    rest_folder: Path | None = None
    longest: int | None = None
    timeout_s: float = 600.0
    peak_tflops: float | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step; the same in every process.

    Attributes:
        metrics: loss, gradient norm (before clipping), learning rate, and the algorithm's metrics over the whole batch.
            Empty where no token was to be trained; weights and optimizer are unchanged then.
        skipped: True where the gradient was not finite: weights and optimizer are unchanged.
    """

    metrics: dict[str, float]
    skipped: bool


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """A full tensor as it leaves an engine.

    Attributes:
        name: Hugging Face name.
        dtype, shape: of the tensor.
        holder: the process that receives it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    holder: int = 0


WeightPart = Literal["policy", "base", "adapter"]
"""The tensors that leave an engine: those of the policy with its adapter merged in, of its base, or of the adapter.
Those of an adapter have peft's names, and with them comes the head of a value model, which is trained whole. Without an
adapter policy and base are the same."""
WeightShard: TypeAlias = tuple[str, tuple[slice, ...], Tensor]
"""A tensor's name, a place in the full tensor (as an index; empty: all of it), and the part that belongs there."""


class Engine(ABC):
    """A language model or a value model, with its optimizer where it is trained, on this process's device.

    Attributes:
        layout: place of this process in the model.
        world: all of the learner's processes.
        device: where batches must be and results are.
        trained: it has an optimizer.
        packing: how it computes the sequences of a micro-batch, which are to be planned accordingly.
        vocab_size: token ids are below it.
        cost: operations of a forward pass.
        peak_tflops: that a device can do at most in the compute dtype, in 10^12 per second; None: not known.
    """

    layout: Layout
    world: World
    device: torch.device
    trained: bool
    packing: Packing
    vocab_size: int
    cost: ModelCost
    peak_tflops: float | None

    @abstractmethod
    def probe(self) -> Evidence:
        """Proves on a few random sequences that the model is computed right; to be called before anything is trained.

        Log-probs or values, and for a trained model the gradient, are compared with those of transformers' own code.
        It costs less than a training step and changes nothing but, where need be, `packing`.

        Returns:
            How far they are apart.

        Raises:
            DataError: they differ, in every process.
        """

    @abstractmethod
    def accumulate(self, batches: Sequence[PackedBatch], loss: Loss, counts: GlobalCounts) -> None:
        """Adds micro-batches to the gradient of the next step; changes nothing else.

        It may be called several times for one step.

        Args:
            batches: of this data-parallel rank (ranks may have different numbers, also none).
            loss: gives each micro-batch's share of the loss, where `layout.has_results`. It is called with the fields
                of `ModelOutput` that belong to the kind of model, with gradient (the entropy's only with
                `EngineSpec.entropy_gradient`).
            counts: sizes of the step's whole batch over all ranks, see `global_counts`.

        Raises:
            ConfigError: the model is not trained.
            Exception: that of the loss, where one is called; other processes of the data-parallel rank wait meanwhile.
        """

    @abstractmethod
    def apply(self, at: RunStep | None = None) -> StepResult:
        """The optimizer step on the accumulated gradient, which is gone afterwards.

        Args:
            at: step of the run, which gives the learning rate; None: the engine counts its optimizer steps.

        Raises:
            RuntimeError: there is no gradient.
        """

    @abstractmethod
    def discard(self) -> None:
        """Gives up the accumulated gradient, whole or of an `accumulate` that has failed.

        Model and optimizer are then as after the last `apply`. Without a gradient nothing happens.
        """

    @abstractmethod
    def infer(
        self, batches: Sequence[PackedBatch], *, sum_pi_squared: bool = False, adapter: bool = True
    ) -> list[ModelOutput]:
        """The model's output for the trained tokens, without gradient.

        Args:
            batches: micro-batches of this data-parallel rank.
            sum_pi_squared: give that field too (language models).
            adapter: False: of the base model, as if its adapter had never been trained.

        Returns:
            Per micro-batch where `layout.has_results`, else nothing; `gather` brings them to every process.

        Raises:
            ConfigError: `adapter` is False and the model has none: its base does not exist any more.
        """

    def global_counts(self, batches: Sequence[PackedBatch]) -> GlobalCounts:
        """Counts of the given micro-batches, summed over the data-parallel ranks."""
        counts = sum((batch.counts for batch in batches), GlobalCounts(0, 0))
        own = (counts.tokens, counts.sequences) if self.layout.has_results else (0, 0)
        return GlobalCounts(*self.world.sum_ints(own))

    def gather(self, values: Tensor) -> list[Tensor]:
        """Every data-parallel rank's values, in the order of the ranks, in every process.

        Args:
            values: [N], of one dtype everywhere; N may differ and may be 0. Those of processes without results are not
                read.
        """
        parts = self.world.gather(values if self.layout.has_results else values[:0])
        return [parts[source] for source in self.layout.sources]

    @abstractmethod
    def exported_tensors(
        self, dtype: torch.dtype | None = None, *, holders: Sequence[int] = (0,), part: WeightPart = "policy"
    ) -> Sequence[ExportedTensor]:
        """The tensors that `export_weights` gives for these arguments, those of all holders, in the order of the model.

        The same in every process and at any time. It reads no weights and waits for no process.
        """

    @abstractmethod
    def exported_shards(
        self, dtype: torch.dtype | None = None, *, part: WeightPart = "policy"
    ) -> Iterator[WeightShard]:
        """This process's parts of the full tensors, for processes that fill the tensors together.

        The parts of all processes fill each tensor of `exported_tensors` once. No process waits for another.

        Args:
            dtype: dtype of floating-point tensors; none: the model section's.
            part: which tensors.

        Yields:
            Shards on the CPU. Memory is used again once the next is asked for.
        """

    @abstractmethod
    def export_weights(
        self, dtype: torch.dtype | None = None, *, holders: Sequence[int] = (0,), part: WeightPart = "policy"
    ) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under their Hugging Face names, on the CPU, tied ones once; each in one of the holders.

        Every process exhausts the iterator, at the same time: to advance it is collective. A holder gets its tensors in
        the order of the model; the other processes get none. With the leader alone as holder everything passes through
        it. With `range(layout.processes)` each process gets a part, and parts have about the same number of bytes. So
        weights can leave on every machine at once. `exported_tensors` says which process receives which tensor.

        No process holds the full model. Beyond what it trains it has a batch of full tensors (64 MiB, or one tensor
        that is larger) and messages of that size. Tensors may share memory with the model or with one another: copy
        those that must outlive the next one.

        Args:
            dtype: dtype of floating-point tensors; none: the model section's.
            holders: processes that receive tensors (`Layout.process`), the same everywhere.
            part: which tensors, the same everywhere.
        """

    @abstractmethod
    def begin_checkpoint(self, folder: Path, extra: dict[str, object]) -> Future[None]:
        """Has model, optimizer, schedule, random state and `extra` (JSON) written into an empty folder. Not atomic.

        The state is that of this moment, between two steps: it is copied when this returns, so that training may
        continue. An engine writes one checkpoint at a time.

        Returns:
            Done when this process's part is written, perhaps with an OSError of this process alone.
            `learner.checkpoint.store.CheckpointStore` brings the processes' answers together.

        Raises:
            RuntimeError: a gradient has been accumulated.
        """

    @abstractmethod
    def load_checkpoint(self, folder: Path) -> dict[str, object]:
        """Restores a checkpoint of `begin_checkpoint`, in any layout; returns its `extra`.

        Raises:
            DataError: the folder has no whole checkpoint of this model.
        """

    @abstractmethod
    def export_hf(self, folder: Path) -> None:
        """Writes a Hugging Face folder (configuration, safetensors, tokenizer) that `transformers` loads."""

    @abstractmethod
    def offload(self, *, params: bool = True, optimizer: bool = True, gradients: bool = True) -> None:
        """Moves parts of the engine's memory to the host, and gives the device's back to its driver.

        Collective: no process computes with a model that another has moved. It may be called amid a step, after
        `accumulate`. Parts that have moved before, or that do not exist, stay as they are. A call that needs a part
        which has moved is refused with a RuntimeError. `infer` and `export_weights` need the parameters, `accumulate`
        the gradients too, checkpoints parameters and optimizer, and `apply` all.

        Args:
            params: the parameters; buffers are small and stay.
            optimizer: the optimizer's state (and masters that are not the parameters themselves).
            gradients: accumulated ones.

        Raises:
            SwapError: `EngineSpec.rest_folder` has no room for all of it; an `onload` undoes what has moved.
        """

    @abstractmethod
    def onload(self, *, params: bool = True, optimizer: bool = True, gradients: bool = True) -> None:
        """Brings parts back to the device; those that are there, and those that rest between calls, stay as they are.

        Raises:
            RuntimeError: there is no room for all of it; an `offload` undoes what has moved.
        """

    @abstractmethod
    def rest_between_calls(self, *, params: bool = False, optimizer: bool = False, gradients: bool = False) -> None:
        """Has parts rest on the host between calls from now on: those asked for, and those of the specification.

        Such a part comes to the device for each call that needs it. It replaces an earlier choice and moves nothing: an
        `onload` or the next call does.
        """

    @property
    @abstractmethod
    def resting_bytes(self) -> Mapping[str, int]:
        """Bytes of this process's parts that are on the host: `params`, `optimizer` and `gradients`."""

    @abstractmethod
    def close(self) -> None:
        """Frees the engine's memory; the engine cannot be used afterwards."""
