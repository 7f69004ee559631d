"""The Megatron engine: a runner, the optimizer and its steps, memory and state, with the interface of engines."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.types import GlobalCounts, ModelOutput
from rollmesh.learner.batching.types import PackedBatch, Packing
from rollmesh.learner.engines.interface import (
    Engine,
    EngineSpec,
    ExportedTensor,
    StepResult,
    WeightPart,
    WeightShard,
)
from rollmesh.learner.engines.megatron.adapters.merging import merged_tensors
from rollmesh.learner.engines.megatron.adapters.rules import adapted_layers, adapter_shapes, is_adapter_parameter
from rollmesh.learner.engines.megatron.computing.model import padded_vocabulary
from rollmesh.learner.engines.megatron.computing.runner import MegatronRunner
from rollmesh.learner.engines.megatron.families.registry import family_of
from rollmesh.learner.engines.megatron.groups import MegatronGroups
from rollmesh.learner.engines.megatron.memory import MegatronMemory
from rollmesh.learner.engines.megatron.probe import Fingerprints, found_by, judge, truth_of, weighted_sum
from rollmesh.learner.engines.megatron.requirements import ModelFacts, resolve_sizes
from rollmesh.learner.engines.megatron.training.gradients import Gradients
from rollmesh.learner.engines.megatron.training.optimizer import MegatronOptimizer, OwnedRange
from rollmesh.learner.engines.megatron.training.state import boxed_state, fill_master, parts_of, read_steps
from rollmesh.learner.engines.megatron.training.step import MegatronStep
from rollmesh.learner.engines.megatron.unsupported import check_optimizer, check_settings
from rollmesh.learner.engines.megatron.weight_rules import Piece, Pieces
from rollmesh.learner.engines.megatron.weights.divided import divided_tensors
from rollmesh.learner.engines.megatron.weights.loading import load_weights
from rollmesh.learner.engines.megatron.weights.weight_map import FullTensor, ParameterKey, WeightMap
from rollmesh.learner.engines.probe_batches import make_probe_batches
from rollmesh.learner.engines.resting_parts import (
    GRADIENTS,
    OPTIMIZER,
    PARAMS,
    chosen_parts,
    resting_parts,
)
from rollmesh.learner.engines.schedule import RunStep
from rollmesh.learner.engines.tensors.adapters import AdapterStart
from rollmesh.learner.engines.tensors.divided_tensor import DividedTensor
from rollmesh.learner.engines.tensors.export import exported_tensors, full_tensors, own_shards
from rollmesh.learner.engines.tensors.hf_folder import write_weights
from rollmesh.learner.engines.tensors.state import StateWriter, load_state
from rollmesh.learner.engines.tolerances import Evidence
from rollmesh.learner.engines.world import World
from rollmesh.learner.model_files.adapter_names import is_adapter, is_trained_with_adapters, peft_name
from rollmesh.learner.model_files.location import local_folder
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.mesh.errors import ConfigError, DataError


class MegatronEngine(Engine):
    """A Hugging Face model, computed and trained by Megatron-Core.

    Args:
        spec: of the engine.
        value_model: with a scalar head in place of the vocabulary.
    """

    def __init__(self, spec: EngineSpec, *, value_model: bool) -> None:
        check_settings(spec)
        if spec.optimizer is not None:
            check_optimizer(spec.optimizer)
        self._spec, self._value_model = spec, value_model
        self.world = World(spec.device, need_group=True, timeout_s=spec.timeout_s)
        self.device = self.world.device
        self.trained = spec.optimizer is not None
        self.packing = Packing.REPEATED
        self.peak_tflops = spec.peak_tflops
        if self.world.first:
            torch.manual_seed(spec.seed)
        self._folder = local_folder(spec.model)
        with StoredModel(self._folder, backbone_only=value_model) as stored:
            text = stored.model.config.get_text_config()
            self.vocab_size = text.vocab_size
            sizes = resolve_sizes(
                spec.parallel, self.world.processes, ModelFacts.read(spec.model.path, stored.model.config.to_dict())
            )
            family = family_of(stored.model.config)
            settings = family.settings(text, value_model=value_model)
            described, adapters = stored.describe(), []
            if spec.lora is not None:
                adapters = adapted_layers(family.rules, spec.lora, described, spec.model.path)
                described = described | {
                    name: torch.empty(shape, device="meta")
                    for name, shape in adapter_shapes(
                        adapters, spec.lora.rank, {name: tensor.shape for name, tensor in described.items()}
                    ).items()
                }
                family = replace(family, rules=(*family.rules, *(rule for found in adapters for rule in found.rules())))
            self._weights = WeightMap(
                family,
                text,
                sizes,
                described,
                padded_vocabulary(self.vocab_size, sizes),
                value_model=value_model,
                head_bias=spec.head_bias,
            )
            self._groups = MegatronGroups(sizes, self.world)
            with self._groups.active():
                self._runner = runner = MegatronRunner(
                    spec, self.world, sizes, stored, settings, self._weights, adapters, value_model=value_model
                )
            self._pieces = {key: self._weights.pieces(runner.place, *key) for key in runner.parameters}
            self._keys = {parameter: key for key, parameter in runner.parameters.items()}
            parts: dict[str, Any] = {PARAMS: runner.parameters.values}
            self._step: MegatronStep | None = None
            self._writer: StateWriter | None = None
            if (section := spec.optimizer) is not None:
                with self._groups.active(optimizer=True):
                    self._optimizer = optimizer = MegatronOptimizer(section, spec, runner.chunks)
                self._gradients = Gradients(runner.chunks)
                self._step = MegatronStep(runner, optimizer, self._gradients, section, spec.total_steps, self._groups)
                self._writer = StateWriter(self.world, keep_copy=spec.rest_folder is None)
                parts |= {OPTIMIZER: optimizer.states, GRADIENTS: self._gradients.tensors}
            self._memory = MegatronMemory(parts, self.device, spec.rest_folder)
            self._load_together(stored)
        self._sizes = sizes
        self.layout, self.cost = runner.layout, runner.cost
        self._full: list[DividedTensor] = []
        self._resting = resting_parts(spec)
        self._memory.offload(self._resting)

    def probe(self) -> Evidence:
        names = [full.name for full in self._trained_tensors()]
        batches = make_probe_batches(self.vocab_size, self.device)
        with self._using(PARAMS):
            truth = truth_of(self._spec, self.world, batches, names, value_model=self._value_model)
        outputs, leak = found_by(self, batches)
        gradient = None
        if self._step is not None:
            with self._runner.routers.without_losses():
                self.accumulate([batches.packed], weighted_sum(self), self.global_counts([batches.packed]))
            gradient = self._gradient_prints(names)
            self.discard()
        return judge(f"model {self._spec.model.path!r}", self._spec, truth, (outputs, gradient), leak)

    def accumulate(self, batches: Sequence[PackedBatch], loss: Loss, counts: GlobalCounts) -> None:
        step, _ = self._training()
        with self._using(PARAMS, GRADIENTS), self._groups.active():
            step.accumulate(batches, loss, counts)

    def apply(self, at: RunStep | None = None) -> StepResult:
        step, _ = self._training()
        with self._using(PARAMS, OPTIMIZER, GRADIENTS):
            result = step.apply(at)
            if PARAMS in self._resting:
                self._wait_for_parameters()
            return result

    def discard(self) -> None:
        if self._step is not None:
            self._memory.forget_gradients()
            self._step.discard()

    @torch.no_grad()
    def infer(
        self, batches: Sequence[PackedBatch], *, sum_pi_squared: bool = False, adapter: bool = True
    ) -> list[ModelOutput]:
        if not adapter and self._spec.lora is None:
            raise ConfigError(
                f"model {self._spec.model.path!r} has no adapter that could be left out",
                hint="give the reference a role of its own",
            )
        runner = self._runner
        with self._using(PARAMS), self._groups.active():
            real, filling = runner.fill_up(batches)
            outputs = iter(runner.infer([*real, *filling], sum_pi_squared=sum_pi_squared, adapter=adapter))
        if not self.layout.has_results:
            return []
        return [
            next(outputs) if batch.tokens.num_tokens else runner.empty_output(sum_pi_squared=sum_pi_squared)
            for batch in batches
        ]

    def exported_tensors(
        self, dtype: torch.dtype | None = None, *, holders: Sequence[int] = (0,), part: WeightPart = "policy"
    ) -> Sequence[ExportedTensor]:
        return exported_tensors(self._divided(part), dtype or getattr(torch, self._spec.model.dtype), holders)

    def exported_shards(
        self, dtype: torch.dtype | None = None, *, part: WeightPart = "policy"
    ) -> Iterator[WeightShard]:
        with self._using(PARAMS):
            self._wait_for_parameters()
            yield from own_shards(self._divided(part), self.world, dtype or getattr(torch, self._spec.model.dtype))

    def export_weights(
        self, dtype: torch.dtype | None = None, *, holders: Sequence[int] = (0,), part: WeightPart = "policy"
    ) -> Iterator[tuple[str, Tensor]]:
        with self._using(PARAMS):
            dtype = dtype or getattr(torch, self._spec.model.dtype)
            self._wait_for_parameters()
            yield from full_tensors(self._divided(part), self.world, dtype, holders)

    def begin_checkpoint(self, folder: Path, extra: dict[str, object]) -> Future[None]:
        step, writer = self._training()
        if step.pending is not None:
            raise RuntimeError("a checkpoint is of the state between two steps")
        with self._using(PARAMS, OPTIMIZER):
            state = self._state(step.steps, saved=True)
            return writer.begin(folder, state, step.steps, extra | self._runner.routers.saved())

    def load_checkpoint(self, folder: Path) -> dict[str, object]:
        step, _ = self._training()
        if step.pending is not None:
            raise RuntimeError("a checkpoint is loaded between two steps")
        with self._using(PARAMS, OPTIMIZER):
            # Moments count from where they are, for the folder may be refused.
            state = self._state(step.steps, saved=False)
            step.steps, extra = load_state(folder, self.world, state)
            with self._groups.active(optimizer=True):
                self._optimizer.complete(read_steps(state))
                self._optimizer.parameters_from_masters()
        self._runner.routers.restore(extra)
        return extra

    def export_hf(self, folder: Path) -> None:
        write_weights(self, self._spec.model, folder, backbone_only=self._value_model)

    def _wait_for_parameters(self) -> None:
        if self._step is not None:
            self._optimizer.wait_for_parameters()

    def offload(self, *, params: bool = True, optimizer: bool = True, gradients: bool = True) -> None:
        self._wait_for_parameters()
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
        self._runner = self._step = self._optimizer = self._memory = None  # type: ignore[assignment]  # no use now
        self._keys, self._pieces, self._full = {}, {}, []
        gc.collect()
        self.world.close()

    @contextmanager
    def _using(self, *parts: str) -> Iterator[None]:
        """Has parts on the device; those that rest between calls return to the host at the end."""
        resting = [part for part in parts if part in self._resting]
        self._memory.onload(resting)
        self._memory.require(*parts)
        try:
            yield
        finally:
            self._memory.offload(resting)

    def _training(self) -> tuple[MegatronStep, StateWriter]:
        if self._step is None or self._writer is None:
            raise ConfigError(
                f"model {self._spec.model.path!r} was made without an optimizer", hint="declare its role as trained"
            )
        return self._step, self._writer

    def _load_together(self, stored: StoredModel) -> None:
        """Loads, and fails on every process where one of them fails: each reads other parts of the files."""
        failed: Exception | None = None
        try:
            self._load(stored)
        except DataError as error:
            failed = error
        reasons = self.world.gather_failures(failed, str(failed or ""))
        if failed is not None:
            raise failed
        if reason := next(filter(None, reasons), ""):
            raise DataError(reason)

    def _load(self, stored: StoredModel) -> None:
        """Fills parameters, and masters in float32 where they are not the parameters themselves."""
        masters: dict[ParameterKey, OwnedRange] = {}
        if self._step is not None and self._spec.param_dtype != "float32":
            masters = {self._keys[own.parameter]: own for own in self._optimizer.ranges()}
        for key, own in masters.items():
            if self._pieces[key].padded:
                own.master.detach().zero_()

        def note(key: ParameterKey, piece: Piece, values: Tensor) -> None:
            if key in masters:
                fill_master(masters[key], self._pieces[key], piece, values)

        base = {key: value for key, value in self._runner.parameters.items() if not is_adapter_parameter(key[1])}
        load_weights(base, {key: self._pieces[key] for key in base}, stored, note)
        if self._spec.lora is None:
            return
        shapes = {full.name: full.shape for full in self._trained_tensors() if is_adapter(full.name)}
        start = AdapterStart(self._spec.lora, shapes, self._spec.seed)
        for key in self._runner.parameters.keys() - base.keys():
            for piece in self._pieces[key].pieces:
                values = start.values(piece.hf_name)[piece.hf_box]
                piece.view(self._runner.parameters[key]).copy_(values)
                note(key, piece, values)

    def _trained_tensors(self) -> list[FullTensor]:
        """The full tensors that training changes."""
        full = self._weights.full_tensors()
        return full if self._spec.lora is None else [one for one in full if is_trained_with_adapters(one.name)]

    def _divided(self, part: WeightPart) -> Sequence[DividedTensor]:
        """Full tensors that leave the engine, as all processes hold them."""
        runner, lora = self._runner, self._spec.lora
        if not self._full:
            dtype = getattr(torch, self._spec.param_dtype)
            self._full = divided_tensors(self._weights, self._sizes, runner.place, runner.parameters, dtype)
        if lora is None:
            return self._full
        if part == "adapter":
            return [replace(one, name=peft_name(one.name)) for one in self._full if is_trained_with_adapters(one.name)]
        if part == "base":
            return [one for one in self._full if not is_trained_with_adapters(one.name)]
        base = [found for found in self._full if not is_adapter(found.name)]
        return merged_tensors(base, self.world.process, runner.parameters, self._pieces, lora.scale)

    def _gradient_prints(self, names: list[str]) -> Tensor:
        """Fingerprints of the accumulated gradient, see `probe`; collective."""
        prints = Fingerprints(names)
        with self._using(GRADIENTS), self._groups.active():
            self._gradients.finish()
            for own, pieces in self._owned(saved=True):
                gradient = own.gradient
                for part in parts_of(pieces, own.start, own.stop):
                    prints.add(part.name, part.box, part.view(gradient))
        return prints.total(self.world)

    def _state(self, steps: int, *, saved: bool) -> dict[str, Any]:
        """The state in boxes, of steps that the moments have seen."""
        shapes = {full.name: full.shape for full in self._trained_tensors()}
        self._optimizer.complete(steps)
        return boxed_state(self._owned(saved=saved), shapes, steps)

    def _owned(self, *, saved: bool) -> Iterator[tuple[OwnedRange, Pieces]]:
        """The optimizer's ranges with the pieces of their tensors.

        Args:
            saved: without those that other processes have as well.
        """
        for own in self._optimizer.ranges():
            part, name = key = self._keys[own.parameter]
            if not saved or self._weights.contributes(self._runner.place, part, name):
                yield own, self._pieces[key]
