"""The FSDP2 engine: a runner, the optimizer and its steps, memory and state, with the interface of engines."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.types import GlobalCounts, ModelOutput
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.fsdp2.lora.layers import without_adapters
from rollmesh.learner.engines.fsdp2.lora.merging import gather_factors, merged_tensors
from rollmesh.learner.engines.fsdp2.memory import EngineMemory
from rollmesh.learner.engines.fsdp2.optimizer_state import saved_state
from rollmesh.learner.engines.fsdp2.optimizers.build import build_optimizer
from rollmesh.learner.engines.fsdp2.preparation.blocks import transformer_blocks
from rollmesh.learner.engines.fsdp2.preparation.fsdp import free_gathered
from rollmesh.learner.engines.fsdp2.probe import run_probe
from rollmesh.learner.engines.fsdp2.runner import ModelRunner
from rollmesh.learner.engines.fsdp2.shards import divided_tensors
from rollmesh.learner.engines.fsdp2.step import TrainingStep
from rollmesh.learner.engines.interface import (
    Engine,
    EngineSpec,
    ExportedTensor,
    StepResult,
    WeightPart,
    WeightShard,
)
from rollmesh.learner.engines.resting_parts import (
    GRADIENTS,
    OPTIMIZER,
    PARAMS,
    chosen_parts,
    resting_parts,
)
from rollmesh.learner.engines.schedule import RunStep
from rollmesh.learner.engines.tensors.divided_tensor import DividedTensor
from rollmesh.learner.engines.tensors.export import exported_tensors, full_tensors, own_shards
from rollmesh.learner.engines.tensors.hf_folder import write_weights
from rollmesh.learner.engines.tensors.state import StateWriter, load_state
from rollmesh.learner.engines.tolerances import Evidence
from rollmesh.learner.engines.world import World
from rollmesh.learner.model_files.adapter_names import is_trained_with_adapters, peft_name
from rollmesh.mesh.errors import ConfigError

MakeRunner = Callable[[EngineSpec, World], ModelRunner]


class Fsdp2Engine(Engine):
    """A Hugging Face model under an optimizer, sharded over the ranks where there are several.

    Args:
        spec: of the engine.
        make_runner: class of the kind of model.
    """

    def __init__(self, spec: EngineSpec, make_runner: MakeRunner) -> None:
        self._spec = spec
        self.world = World(spec.device, need_group=spec.param_dtype != "float32", timeout_s=spec.timeout_s)
        self.device = self.world.device
        self.trained = spec.optimizer is not None
        self._runner = runner = make_runner(spec, self.world)
        self.layout, self.packing, self.vocab_size = runner.layout, runner.packing, runner.vocab_size
        self.cost = runner.cost()
        self.peak_tflops = spec.peak_tflops
        self._optimizer: Optimizer | None = None
        self._step: TrainingStep | None = None
        if (section := spec.optimizer) is not None:
            self._optimizer = build_optimizer(section, runner.module, transformer_blocks(runner.module))
            self._step = TrainingStep(
                runner, self._optimizer, self._update, section, spec.total_steps, sync_once=spec.sync_once
            )
        self._writer = StateWriter(self.world, keep_copy=spec.rest_folder is None) if self.trained else None
        self._memory = EngineMemory(runner.module, self._optimizer, self.device, spec.rest_folder)
        self._resting = resting_parts(spec)
        self._memory.offload(self._resting)

    def probe(self) -> Evidence:
        config = self._runner.transformer.config
        name = f"model {self._spec.model.path!r} ({config.model_type})"
        vocabulary = config.get_text_config().vocab_size
        with self._using(PARAMS):
            evidence = run_probe(self._runner, name, vocabulary, self.world, self._spec.param_dtype)
        self.packing = self._runner.packing
        return evidence

    def accumulate(self, batches: Sequence[PackedBatch], loss: Loss, counts: GlobalCounts) -> None:
        step = self._training()[0]
        with self._using(PARAMS, GRADIENTS):
            step.accumulate(batches, loss, counts)

    def apply(self, at: RunStep | None = None) -> StepResult:
        step = self._training()[0]
        # A state that rests comes in pieces.
        state = () if OPTIMIZER in self._resting else (OPTIMIZER,)
        with self._using(PARAMS, *state, GRADIENTS):
            return step.apply(at)

    def discard(self) -> None:
        if self._step is not None:
            self._step.discard()
            self._memory.forget_gradients()

    @torch.no_grad()
    def infer(
        self, batches: Sequence[PackedBatch], *, sum_pi_squared: bool = False, adapter: bool = True
    ) -> list[ModelOutput]:
        if not adapter and self._spec.lora is None:
            raise ConfigError(
                f"model {self._spec.model.path!r} has no adapter that could be left out",
                hint="give the reference a role of its own",
            )
        base = nullcontext() if adapter else without_adapters(self._runner.module)
        with self._using(PARAMS), base:
            real, filling = self._runner.fill_up(batches)
            outputs = iter([self._runner.forward(batch, sum_pi_squared=sum_pi_squared)[0] for batch in real])
            for batch in filling:
                self._runner.forward(batch)
        if not self.layout.has_results:
            return []
        return [
            next(outputs) if batch.tokens.num_tokens else self._runner.empty_output(sum_pi_squared=sum_pi_squared)
            for batch in batches
        ]

    def exported_tensors(
        self, dtype: torch.dtype | None = None, *, holders: Sequence[int] = (0,), part: WeightPart = "policy"
    ) -> Sequence[ExportedTensor]:
        dtype = dtype or getattr(torch, self._spec.model.dtype)
        return exported_tensors(self._divided_tensors(part), dtype, holders)

    def exported_shards(
        self, dtype: torch.dtype | None = None, *, part: WeightPart = "policy"
    ) -> Iterator[WeightShard]:
        dtype = dtype or getattr(torch, self._spec.model.dtype)
        with self._using(PARAMS):
            yield from own_shards(self._divided_tensors(part, self._gather_factors(part)), self.world, dtype)

    def export_weights(
        self, dtype: torch.dtype | None = None, *, holders: Sequence[int] = (0,), part: WeightPart = "policy"
    ) -> Iterator[tuple[str, Tensor]]:
        dtype = dtype or getattr(torch, self._spec.model.dtype)
        with self._using(PARAMS):
            yield from full_tensors(self._divided_tensors(part, self._gather_factors(part)), self.world, dtype, holders)

    def begin_checkpoint(self, folder: Path, extra: dict[str, object]) -> Future[None]:
        step, optimizer, writer = self._training()
        if step.pending is not None:
            raise RuntimeError("a checkpoint is of the state between two steps")
        with self._using(PARAMS, OPTIMIZER):
            state = saved_state(self._runner.saved_tensors(), optimizer)
            return writer.begin(folder, state, step.steps, extra | self._runner.routers.saved())

    def load_checkpoint(self, folder: Path) -> dict[str, object]:
        step, optimizer, _ = self._training()
        if step.pending is not None:
            raise RuntimeError("a checkpoint is loaded between two steps")
        with self._using(PARAMS, OPTIMIZER):
            state = saved_state(self._runner.saved_tensors(), optimizer)
            step.steps, extra = load_state(folder, self.world, state)
        self._runner.routers.restore(extra)
        return extra

    def export_hf(self, folder: Path) -> None:
        write_weights(self, self._spec.model, folder, backbone_only=self._runner.backbone_only)

    def offload(self, *, params: bool = True, optimizer: bool = True, gradients: bool = True) -> None:
        self._memory.offload(chosen_parts(params=params, optimizer=optimizer, gradients=gradients))

    def onload(self, *, params: bool = True, optimizer: bool = True, gradients: bool = True) -> None:
        parts = chosen_parts(params=params, optimizer=optimizer, gradients=gradients)
        self._memory.onload([part for part in parts if part not in self._resting])

    def rest_between_calls(self, *, params: bool = False, optimizer: bool = False, gradients: bool = False) -> None:
        chosen = chosen_parts(params=params, optimizer=optimizer, gradients=gradients)
        self._resting = [*chosen, *(part for part in resting_parts(self._spec) if part not in chosen)]

    @property
    def resting_bytes(self) -> Mapping[str, int]:
        return self._memory.resting_bytes

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        # The sharded model refers to the process group, whose threads end only with the last reference: drop it first.
        self._runner = self._step = self._optimizer = self._memory = None  # type: ignore[assignment]  # no use now
        gc.collect()
        self.world.close()

    @contextmanager
    def _using(self, *parts: str) -> Iterator[None]:
        """Has parts on the device; those that rest between calls return to the host at the end.

        Nothing stays gathered. A pass without gradient leaves whole weights, at least the root's, and passes after an
        optimizer's step would still compute with them.
        """
        resting = [part for part in parts if part in self._resting]
        self._memory.onload(resting)
        self._memory.require(*parts)
        try:
            yield
        finally:
            free_gathered(self._runner.module)
            self._memory.offload(resting)

    def _divided_tensors(
        self, part: WeightPart = "policy", factors: Mapping[str, tuple[Tensor, Tensor]] | None = None
    ) -> Iterator[DividedTensor]:
        """The tensors that leave the engine; without factors only shapes and places of merged ones hold."""
        named, processes = self._runner.named_tensors(), self.world.processes
        if part == "adapter":
            trained = ((peft_name(name), found) for name, found in named if is_trained_with_adapters(name))
            return divided_tensors(trained, processes)
        if self._spec.lora is None:
            return divided_tensors(named, processes)
        if part == "base":
            base = ((name, found) for name, found in named if not is_trained_with_adapters(name))
            return divided_tensors(base, processes)
        return merged_tensors(named, processes, self._spec.lora.scale, factors or {})

    def _gather_factors(self, part: WeightPart) -> dict[str, tuple[Tensor, Tensor]]:
        merges = part == "policy" and self._spec.lora is not None
        return gather_factors(self._runner.named_tensors()) if merges else {}

    def _update(self) -> None:
        """Takes the optimizer's step."""
        if OPTIMIZER in self._resting:
            self._memory.step_by_pieces()
        else:
            self._training()[1].step()

    def _training(self) -> tuple[TrainingStep, Optimizer, StateWriter]:
        if self._step is None or self._optimizer is None or self._writer is None:
            raise ConfigError(
                f"model {self._spec.model.path!r} was made without an optimizer", hint="declare its role as trained"
            )
        return self._step, self._optimizer, self._writer
