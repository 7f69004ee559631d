"""The base of the FSDP2 engines of all kinds of models.

Invariants: gradients are sums of the micro-batches' shares over all data-parallel ranks (FSDP averages over processes,
so shares are multiplied by their number). All ranks run the same number of micro-batches, short ones fill up with a
share of zero. A step whose gradient is not finite changes nothing. Making an engine leaves the random numbers of the
others alone.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedConfig, PreTrainedModel

from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.types import GlobalCounts, ModelOutput
from rollmesh.learner.batching.pack import pack
from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.batching.types import PackedBatch, PackedRow, Packing, TrainSequence
from rollmesh.learner.engines.fsdp2.architecture import choose_packing
from rollmesh.learner.engines.fsdp2.attention import ATTENTION
from rollmesh.learner.engines.fsdp2.dense_attention import describe_dense_attention
from rollmesh.learner.engines.fsdp2.export import full_tensors
from rollmesh.learner.engines.fsdp2.layout import AttentionLayout, build_layout
from rollmesh.learner.engines.fsdp2.loading import load_weights, open_model
from rollmesh.learner.engines.fsdp2.memory import GRADIENTS, OPTIMIZER, PARAMS, EngineMemory
from rollmesh.learner.engines.fsdp2.optimizers.build import build_optimizer
from rollmesh.learner.engines.fsdp2.optimizers.schedule import learning_rate
from rollmesh.learner.engines.fsdp2.probe import ComputedValues, read, run_probe
from rollmesh.learner.engines.fsdp2.rows import build_rows
from rollmesh.learner.engines.fsdp2.sharding import (
    Preparation,
    computing_in,
    drop_whole_gradients,
    plain_name,
    prepare,
    recover,
    synchronize_gradients,
    transformer_blocks,
)
from rollmesh.learner.engines.fsdp2.state import StateWriter, load_state
from rollmesh.learner.engines.fsdp2.ulysses.division import KEY as SP_KEY
from rollmesh.learner.engines.fsdp2.ulysses.division import check_division
from rollmesh.learner.engines.fsdp2.ulysses.exchange import DividedLayout, Exchange
from rollmesh.learner.engines.fsdp2.ulysses.row_parts import RowPart, part_of
from rollmesh.learner.engines.fsdp2.varlen import VarlenLayout, build_varlen_layout, has_varlen
from rollmesh.learner.engines.interface import Engine, EngineSpec, StepResult
from rollmesh.learner.engines.layout import Layout
from rollmesh.learner.engines.model_cost import ModelCost, cost_of
from rollmesh.learner.engines.pending_step import PendingStep
from rollmesh.learner.engines.tolerances import Evidence
from rollmesh.learner.engines.world import World
from rollmesh.learner.model_files.folder_writer import write_folder
from rollmesh.learner.model_files.location import local_folder
from rollmesh.learner.model_files.stored_model import StoredModel, quiet_transformers
from rollmesh.learner.model_files.weight_files import WeightFiles
from rollmesh.mesh.config.learner import OptimizerSection
from rollmesh.mesh.errors import ConfigError, DataError

_log = logging.getLogger(__name__)
# Name, in transformers' configurations and layers, of the number of tokens that sliding attention sees.
_WINDOW = "sliding_window"


class Fsdp2Engine(Engine):
    """A Hugging Face model under an optimizer, sharded over the ranks where there are several."""

    _backbone_only: ClassVar[bool] = False

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._param_dtype: torch.dtype = getattr(torch, spec.param_dtype)
        shard_alone = self._param_dtype != torch.float32
        self.world = World(spec.device, need_group=shard_alone)
        self.device = self.world.device
        self.trained = spec.optimizer is not None
        if self.world.first:
            torch.manual_seed(spec.seed)
        with torch.random.fork_rng(devices=[]):
            # On the CPU, where models are built; nothing draws from the device's generator.
            torch.default_generator.manual_seed(spec.seed)
            opened = open_model(spec.model, self.device, backbone_only=self._backbone_only, longest=spec.longest)
        with opened as stored:
            # The part of the model that is transformers' own.
            self._transformer = cast(PreTrainedModel, stored.model.base_model if self._backbone_only else stored.model)
            self._divide(stored.model.config)
            choice = choose_packing(stored.model)
            self._own_attention: str = stored.model.config._attn_implementation
            self._refuse_to_divide(choice.reason)
            self.why_rows = choice.reason
            self._use(choice.packing)
            self.vocab_size = len(cast(Tensor, stored.model.get_input_embeddings().weight))
            self._model = self._build(stored.model)
            prepare(
                self._model,
                Preparation(
                    shard=self.world.processes > 1 or shard_alone,
                    param_dtype=self._param_dtype,
                    trained=self.trained,
                    recompute=spec.activation_checkpointing,
                    offload_activations=spec.memory.offload_activations,
                    reshard_after_forward=spec.memory.reshard_after_forward,
                ),
            )
            new = load_weights(self._model, stored, self.device)
            if new:
                parameters = {plain_name(name): parameter for name, parameter in self._model.named_parameters()}
                self._fill_new({name: parameters[name] for name in new}, stored.files)
        self.cost = self._cost()
        self.peak_tflops = spec.peak_tflops
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = None
        if spec.optimizer is not None:
            self._optimizer = build_optimizer(spec.optimizer, self._model, transformer_blocks(self._model))
        self._steps = 0
        self._pending: PendingStep | None = None
        self._writer = StateWriter(self.world)
        self._memory = EngineMemory(self._model, self._optimizer, self.device)
        self._varlen = has_varlen(self.device, self._param_dtype)
        if not self._varlen:
            self._warn_of_dense_attention()
        if spec.offload:
            self.offload()

    @abstractmethod
    def _build(self, language_model: PreTrainedModel) -> nn.Module:
        """The module to train, with parameters named as in a Hugging Face folder; without memory, as what is given."""

    def _fill_new(self, parameters: Mapping[str, nn.Parameter], files: WeightFiles) -> None:
        """Fills parameters that are not of the language model.

        Args:
            parameters: by name; they have memory.
            files: of the model's folder.
        """
        del files
        raise DataError(f"model {self._spec.model.path!r} lacks weights: {', '.join(parameters)}")

    def _cost(self) -> ModelCost:
        config = self._transformer.config.get_text_config()
        shapes = ((plain_name(name), tuple(parameter.shape)) for name, parameter in self._model.named_parameters())
        return cost_of(config, shapes, tied=bool(config.tie_word_embeddings) and not self._backbone_only)

    @abstractmethod
    def _forward(self, batch: PackedBatch, *, sum_pi_squared: bool = False) -> tuple[ModelOutput, Tensor]:
        """The model's output for the trained tokens, and its differentiable part, float32 [R]."""

    @abstractmethod
    def _empty_output(self, *, sum_pi_squared: bool) -> ModelOutput:
        """The output for no tokens."""

    def probe(self) -> Evidence:
        if self._spec.offload:
            self.onload()
        config = self._transformer.config
        name = f"model {self._spec.model.path!r} ({config.model_type})"
        evidence = run_probe(self, name, config.get_text_config().vocab_size, self.world, self._spec.param_dtype)
        if self._spec.offload:
            self.offload()
        return evidence

    def read(self, batches: Sequence[PackedBatch]) -> ComputedValues:
        """Computes the engine's outputs and gradients as it is now, for the probe."""
        return read(batches, lambda batch: self._forward(batch)[1], self._parameters)

    @contextmanager
    def in_eager_rows(self) -> Iterator[None]:
        """Gives every sequence a row and uses transformers' eager attention, for the probe."""
        packing = self.packing
        self._use(Packing.ROWS, "eager")
        try:
            yield
        finally:
            self._use(packing)

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Computes in float32, without kernels that round more, for the probe."""
        varlen, self._varlen = self._varlen, False
        try:
            with computing_in(self._model, torch.float32), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                yield
        finally:
            self._varlen = varlen

    def recover(self) -> bool:
        """Prepares the engine for another pass after one that broke off, for the probe; False: impossible."""
        return recover(self._model)

    @contextmanager
    def with_short_windows(self, tokens: int) -> Iterator[None]:
        """Limits sliding attention to this many tokens, for the probe."""
        owners = [self._transformer.config.get_text_config(), *self._transformer.modules()]
        windows = [
            (owner, window) for owner in owners if isinstance(window := vars(owner).get(_WINDOW), int) and window
        ]
        for owner, _ in windows:
            setattr(owner, _WINDOW, tokens)
        try:
            yield
        finally:
            for owner, window in windows:
                setattr(owner, _WINDOW, window)

    def repack(self, reason: str) -> None:
        """Gives every sequence a row from now on, for the probe."""
        self._refuse_to_divide(reason)
        self.why_rows = reason
        self._use(Packing.ROWS)
        self._warn_of_dense_attention()

    def embedding(self) -> nn.Module:
        """The embedding of the tokens, for the probe."""
        return self._transformer.get_input_embeddings()

    def _use(self, packing: Packing, attention: str | None = None) -> None:
        """Computes in this way from now on."""
        self.packing = packing
        implementation = attention or (ATTENTION if packing is Packing.SHARED else self._own_attention)
        with quiet_transformers():
            self._transformer.set_attn_implementation(implementation)
        if packing is Packing.ROWS and self._transformer.config._attn_implementation != implementation:
            # transformers does not switch attention outside of its interface; layers that can look here.
            self._transformer.config._attn_implementation = implementation

    def _warn_of_dense_attention(self) -> None:
        heads = getattr(self._transformer.config.get_text_config(), "num_attention_heads", 0)
        warning = describe_dense_attention(
            self.packing, self._own_attention, self.device, self._param_dtype, heads, self._spec.longest
        )
        if warning and self.layout.leads:
            _log.warning("model %r: %s", self._spec.model.path, warning)

    def accumulate(self, batches: Sequence[PackedBatch], loss: Loss, counts: GlobalCounts) -> None:
        self._training_state()
        self._memory.require(PARAMS, GRADIENTS)
        pending = self._pending = self._pending or PendingStep(torch.zeros((), device=self.device))
        real, filling = self._even(batches)
        pending.counted |= counts.tokens > 0
        pending.computed |= bool(real or filling)
        batches = [*real, *filling]
        for number, batch in enumerate(batches, 1):
            if self._spec.sync_once:
                synchronize_gradients(self._model, number == len(batches))
            output, differentiable = self._forward(batch)
            share = _zero(differentiable)
            if number <= len(real) and self.layout.has_results:
                result = loss(output, batch.tokens, counts)
                pending.add(result.loss, result.metrics, batch.tokens.num_tokens)
                # A loss of which nothing depends on the model has a gradient all the same: zero.
                share = result.loss if result.loss.requires_grad else share
            (share * self.layout.processes).backward()

    def apply(self) -> StepResult:
        section, optimizer = self._training_state()
        if (pending := self._pending) is None:
            raise RuntimeError("no gradient was accumulated")
        self._memory.require(PARAMS, OPTIMIZER, GRADIENTS)
        try:
            if not pending.counted:
                return StepResult({}, skipped=False)
            if not pending.computed:
                # Nothing had an advantage on any rank: a gradient of zero, which the optimizer's moments still follow.
                for parameter in self._parameters:
                    parameter.grad = torch.zeros_like(parameter)
            norm = self._clip(section.max_grad_norm)
            rate = learning_rate(section, self._steps, self._spec.total_steps)
            skipped = not np.isfinite(norm)
            if not skipped:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                self._steps += 1
            return StepResult(pending.metrics(self.world) | {"grad_norm": norm, "lr": rate}, skipped)
        finally:
            self._pending = None
            optimizer.zero_grad()

    def discard(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.computed:
            # FSDP keeps a part of what a pass that broke off has computed.
            recover(self._model)
            drop_whole_gradients(self._model)
        self._training_state()[1].zero_grad()
        self._memory.forget_gradients()

    @torch.no_grad()
    def infer(
        self, batches: Sequence[PackedBatch], *, sum_pi_squared: bool = False, adapter: bool = True
    ) -> list[ModelOutput]:
        if not adapter:
            raise ConfigError(
                f"model {self._spec.model.path!r} has no adapter that could be left out",
                hint="give the reference a role of its own",
            )
        if self._spec.offload:
            self.onload()
        self._memory.require(PARAMS)
        real, filling = self._even(batches)
        outputs = iter([self._forward(batch, sum_pi_squared=sum_pi_squared)[0] for batch in real])
        for batch in filling:
            self._forward(batch)
        if self._spec.offload:
            self.offload()
        if not self.layout.has_results:
            return []
        return [
            next(outputs) if batch.tokens.num_tokens else self._empty_output(sum_pi_squared=sum_pi_squared)
            for batch in batches
        ]

    def export_weights(
        self, dtype: torch.dtype | None = None, *, holders: Sequence[int] = (0,)
    ) -> Iterator[tuple[str, Tensor]]:
        self._memory.require(PARAMS)
        dtype = dtype or getattr(torch, self._spec.model.dtype)
        return full_tensors(self._named_tensors(), self.world, dtype, holders)

    def begin_checkpoint(self, folder: Path, extra: dict[str, object]) -> Future[None]:
        if self._pending is not None:
            raise RuntimeError("a checkpoint is of the state between two steps")
        self._memory.require(PARAMS, OPTIMIZER)
        return self._writer.begin(folder, self._model, self._training_state()[1], self._steps, extra)

    def load_checkpoint(self, folder: Path) -> dict[str, object]:
        self._memory.require(PARAMS, OPTIMIZER)
        self._steps, extra = load_state(folder, self.world, self._model, self._training_state()[1])
        return extra

    def export_hf(self, folder: Path) -> None:
        dtype = getattr(torch, self._spec.model.dtype)
        tensors = self.export_weights(dtype)
        if self.layout.leads:
            described = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                for name, tensor in self._named_tensors()
            }
            with StoredModel(local_folder(self._spec.model), backbone_only=self._backbone_only) as source:
                write_folder(folder, source, described, tensors, dtype)
        for _ in tensors:
            raise AssertionError("full tensors are on the leader alone, which has written all")
        self.world.barrier()

    def offload(self, *, params: bool = True, optimizer: bool = True, gradients: bool = True) -> None:
        self._memory.offload(_parts(params, optimizer, gradients))

    def onload(self, *, params: bool = True, optimizer: bool = True, gradients: bool = True) -> None:
        self._memory.onload(_parts(params, optimizer, gradients))

    def close(self) -> None:
        self._writer.close()
        # The sharded model refers to the process group, whose threads end only with the last reference: drop it first.
        self._parameters = []
        self._model = self._transformer = self._optimizer = self._memory = None  # type: ignore[assignment]  # no use now
        gc.collect()
        self.world.close()

    def _divide(self, config: PreTrainedConfig) -> None:
        """Takes this process's place among those that share a micro-batch."""
        sp, processes = self._spec.sp, self.world.processes
        heads = getattr(config.get_text_config(), "num_attention_heads", 0)
        check_division(sp, heads=heads, processes=processes, name=self._spec.model.path)
        self.layout = Layout.of_replicas(self.world.process, processes, sp)
        self._exchange = Exchange(self.world.neighbours(sp)) if sp > 1 else None

    def _refuse_to_divide(self, why_rows: str) -> None:
        """Refuses to divide sequences that need rows."""
        if why_rows and self._exchange is not None:
            raise ConfigError(
                f"the sequences of model {self._spec.model.path!r} cannot be divided over processes: {why_rows}",
                hint=f"set {SP_KEY}: 1",
            )

    def _own_part(self, row: PackedRow) -> RowPart:
        """The part of a micro-batch that this process computes; all of it in rows, which nothing divides."""
        if self._exchange is None or self.packing is Packing.ROWS:
            return part_of(row, 0, 1)
        return part_of(row, self._exchange.part, self._exchange.parts)

    def _inputs(self, part: RowPart) -> tuple[dict[str, Any], Tensor]:
        """The model's input, and the indices of the predictors in its tokens, row after row: int64 [r]."""
        predictors = to_device(part.predictors, self.device)
        if self.packing is Packing.ROWS:
            rows = build_rows(part.segments, self.device)
            return {"input_ids": part.input_ids[0, rows.tokens]}, rows.places[predictors]
        build = build_varlen_layout if self._varlen else build_layout
        whole: AttentionLayout | VarlenLayout = build(part.segments, self.device)
        layout = whole if self._exchange is None else DividedLayout(whole, self._exchange)
        return {"input_ids": part.input_ids, "position_ids": part.position_ids, "layout": layout}, predictors

    def _whole(self, part: RowPart, output: ModelOutput) -> ModelOutput:
        """The output for all trained tokens of a micro-batch, from that of this process's part."""
        if self._exchange is None or part.places is None:
            return output
        fields = [field.name for field in dataclasses.fields(output) if getattr(output, field.name) is not None]
        gathered = self._exchange.gather_outputs(part, [getattr(output, name) for name in fields])
        return ModelOutput(**dict(zip(fields, gathered, strict=True)))

    def _training_state(self) -> tuple[OptimizerSection, Optimizer]:
        if self._spec.optimizer is None or self._optimizer is None:
            raise ConfigError(
                f"model {self._spec.model.path!r} was made without an optimizer", hint="declare its role as trained"
            )
        return self._spec.optimizer, self._optimizer

    def _even(self, batches: Sequence[PackedBatch]) -> tuple[list[PackedBatch], list[PackedBatch]]:
        """Micro-batches with trained tokens, and what fills them up to the same number on every rank."""
        real = [batch for batch in batches if batch.tokens.num_tokens]
        # Agreed on before the first forward pass, whose own collectives must line up between ranks.
        missing = self.world.max_int(len(real)) - len(real)
        return real, [_empty_batch(self.device)] * missing if missing else []

    def _clip(self, most: float) -> float:
        """Clips the gradient to a global norm; gives the norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, most)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, tied ones once, and buffers that belong to the model's state."""
        saved = self._model.state_dict().keys()
        yield from ((plain_name(name), tensor) for name, tensor in self._model.named_parameters())
        yield from ((plain_name(name), tensor) for name, tensor in self._model.named_buffers() if name in saved)


def _parts(params: bool, optimizer: bool, gradients: bool) -> list[str]:
    chosen = {PARAMS: params, OPTIMIZER: optimizer, GRADIENTS: gradients}
    return [part for part, asked in chosen.items() if asked]


def _zero(output: Tensor) -> Tensor:
    """0 with a gradient of zeros, whatever the values are."""
    return output.nan_to_num(neginf=0.0).sum() * 0.0


def _empty_batch(device: torch.device) -> PackedBatch:
    one = np.zeros(1, dtype=np.int32)
    sequence = TrainSequence(one, one, np.ones(1, dtype=np.uint8), np.zeros(1, dtype=np.float32))
    return pack([sequence], device=device)
