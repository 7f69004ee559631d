"""A model on its ranks, built and sharded, and the ways in which it computes micro-batches.

Invariants: making a runner leaves the random numbers of the others alone. All ranks run the same number of passes.
"""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedConfig, PreTrainedModel

from rollmesh.learner.algorithms.types import ModelOutput
from rollmesh.learner.batching.empty import empty_batch
from rollmesh.learner.batching.token_responses import divide_over_copies
from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.batching.types import PackedBatch, PackedRow, Packing
from rollmesh.learner.engines.experts.layers import expert_count
from rollmesh.learner.engines.fsdp2.attention import ATTENTION
from rollmesh.learner.engines.fsdp2.attention_calls import largest_mask, refuse_mask
from rollmesh.learner.engines.fsdp2.exact_attention_limits import describe_dense_attention, refuse_long_masks
from rollmesh.learner.engines.fsdp2.experts.division import divide_experts, expert_mesh
from rollmesh.learner.engines.fsdp2.experts.modules import expert_layers
from rollmesh.learner.engines.fsdp2.experts.routers import Routers
from rollmesh.learner.engines.fsdp2.kernels.choice import EXACT, build_layout_for, choose_kernel
from rollmesh.learner.engines.fsdp2.kernels.choice import KEY as ATTENTION_KEY
from rollmesh.learner.engines.fsdp2.loading import load_weights, open_model
from rollmesh.learner.engines.fsdp2.lora.layers import add_adapters, fill_adapters
from rollmesh.learner.engines.fsdp2.opaque import Opaque
from rollmesh.learner.engines.fsdp2.packing_choice import choose_packing
from rollmesh.learner.engines.fsdp2.parallel_requirements import check_parallel
from rollmesh.learner.engines.fsdp2.preparation.compilation import CompiledLayers
from rollmesh.learner.engines.fsdp2.preparation.compute_dtype import computing_in
from rollmesh.learner.engines.fsdp2.preparation.freezing import freeze
from rollmesh.learner.engines.fsdp2.preparation.fsdp import Preparation, prepare, recover
from rollmesh.learner.engines.fsdp2.preparation.recomputation import plain_name
from rollmesh.learner.engines.fsdp2.preparation.shard_mesh import shard_mesh
from rollmesh.learner.engines.fsdp2.probe import ComputedValues, read
from rollmesh.learner.engines.fsdp2.recurrent.layers import LAYOUT, compute_apart, kernels_separate_sequences
from rollmesh.learner.engines.fsdp2.recurrent.layout import build_recurrent_layout
from rollmesh.learner.engines.fsdp2.rows import build_rows
from rollmesh.learner.engines.fsdp2.ulysses.division import refuse_division
from rollmesh.learner.engines.fsdp2.ulysses.exchange import DividedLayout, Exchange
from rollmesh.learner.engines.fsdp2.ulysses.images import DividedImages
from rollmesh.learner.engines.fsdp2.ulysses.row_parts import RowPart, part_of
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.layer_kinds import window_of
from rollmesh.learner.engines.layout import Layout
from rollmesh.learner.engines.model_cost import ModelCost, cost_of
from rollmesh.learner.engines.output.logit_form import find_backbone
from rollmesh.learner.engines.probe_batches import ProbeImages
from rollmesh.learner.engines.tolerances import REFUSED_HINT
from rollmesh.learner.engines.world import World
from rollmesh.learner.model_files.adapter_names import is_adapter, is_trained_with_adapters
from rollmesh.learner.model_files.stored_model import StoredModel, quiet_transformers
from rollmesh.learner.model_files.weight_files import WeightFiles
from rollmesh.learner.vision.families import family_of
from rollmesh.learner.vision.tower import RowImages, VisionTower
from rollmesh.mesh.config.parallel import RouterSection
from rollmesh.mesh.errors import ConfigError, DataError

log = logging.getLogger(__name__)
# Name, in transformers' configurations and layers, of the number of tokens that sliding attention sees.
_WINDOW = "sliding_window"


def _why_experts_are_plain(spec: EngineSpec) -> str:
    """The reason why layers with experts are not compiled; empty: they may be."""
    if spec.parallel.ep > 1:
        return "its experts exchange tokens"
    return "its routers are watched" if spec.router != RouterSection() else ""


class ImagesRefusedError(DataError):
    """A model that takes images cannot be computed as they need it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"model {name!r} cannot be trained with images: {reason}", hint=REFUSED_HINT)


class ModelRunner(ABC):
    """A Hugging Face model that is sharded over the ranks where there are several; one class per kind of model.

    Args:
        spec: of the engine.
        world: the ranks.

    Attributes:
        module: with parameters named as in a Hugging Face folder, but for `recomputation.plain_name`.
        transformer: the part of it that is transformers' own.
        parameters: those that are trained.
        layout, packing, vocab_size: as of the engine.
        routers: of its experts.
        why_rows: why sequences get a row each, where they do.
        tower: the vision part of a model that takes images; None: it takes text alone.
    """

    backbone_only: ClassVar[bool] = False

    def __init__(self, spec: EngineSpec, world: World) -> None:
        self._spec = spec
        self.world, self.device = world, world.device
        self._param_dtype: torch.dtype = getattr(torch, spec.param_dtype)
        self._proving = False
        if world.first:
            torch.manual_seed(spec.seed)
        with torch.random.fork_rng(devices=[]):
            # On the CPU, where models are built; nothing draws from the device's generator.
            torch.default_generator.manual_seed(spec.seed)
            opened = open_model(spec.model, self.device, backbone_only=self.backbone_only, longest=spec.longest)
        with opened as stored:
            self.transformer = cast(PreTrainedModel, stored.model.base_model if self.backbone_only else stored.model)
            self._divide(stored.model.config)
            choice = choose_packing(stored.model)
            self._own_attention: str = stored.model.config._attn_implementation
            self.tower = self._find_tower(stored.model, choice.reason)
            self._refuse_to_divide(choice.undivided)
            self._refuse_kernel(choice.reason)
            text = stored.model.config.get_text_config()
            capped = getattr(text, "attn_logit_softcapping", None) is not None
            self._causal = not capped and window_of(text) is None
            self._capped = capped
            self._kernel = choose_kernel(spec.attention, self.device, self._param_dtype, capped=capped)
            self.why_rows = choice.reason
            self._recurrent = choice.recurrent
            for layer in choice.recurrent:
                compute_apart(layer)
            self._kernels_separate_sequences = self.device.type == "cuda" and kernels_separate_sequences(
                choice.recurrent
            )
            self._why_plain = choice.undivided or _why_experts_are_plain(spec)
            if self.tower is not None:
                self._why_plain = "it takes images"
            self._layers = CompiledLayers(self.transformer) if spec.compile and not self._why_plain else None
            self._use(choice.packing)
            if self._kernel == EXACT:
                refuse_long_masks(self.packing, self.device, self._param_dtype, spec.longest, capped=capped)
            self.vocab_size = len(cast(Tensor, stored.model.get_input_embeddings().weight))
            self.module = self._build(stored.model)
            if spec.frozen:
                freeze(self.module, spec.frozen, spec.model.path)
            if spec.lora is not None:
                add_adapters(self.module, spec.lora, spec.model.path)
            self.routers = Routers(self.module, spec.router, spec.model.path, world)
            self._shard_and_load(stored)
        self.parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._warn()

    @abstractmethod
    def _build(self, language_model: PreTrainedModel) -> nn.Module:
        """The module to train, with parameters named as in a Hugging Face folder; without memory, as the given one."""

    def _fill_new(self, parameters: Mapping[str, nn.Parameter], files: WeightFiles) -> None:
        """Fills parameters that are not of the language model.

        Args:
            parameters: by name; they have memory.
            files: of the model's folder.
        """
        del files
        raise DataError(f"model {self._spec.model.path!r} lacks weights: {', '.join(parameters)}")

    @abstractmethod
    def forward(self, batch: PackedBatch, *, sum_pi_squared: bool = False) -> tuple[ModelOutput, Tensor]:
        """The model's output for the trained tokens, and its differentiable part, float32 [R]."""

    @abstractmethod
    def empty_output(self, *, sum_pi_squared: bool) -> ModelOutput:
        """The output for no tokens."""

    def cost(self) -> ModelCost:
        """Operations of a forward pass, without those of a vision part."""
        config = self.transformer.config.get_text_config()
        apart = set() if self.tower is None else {id(parameter) for parameter in self.tower.module.parameters()}
        shapes = (
            (plain_name(name), tuple(parameter.shape))
            for name, parameter in self.module.named_parameters()
            if id(parameter) not in apart
        )
        # The text part of some models with images does not say so; the whole does.
        says = config if hasattr(config, "tie_word_embeddings") else self.transformer.config
        tied = bool(says.tie_word_embeddings) and not self.backbone_only
        layers = (plain_name(name) for name, module in self.module.named_modules() if module in self._recurrent)
        return cost_of(config, shapes, tied=tied, stateful=layers)

    def fill_up(self, batches: Sequence[PackedBatch]) -> tuple[list[PackedBatch], list[PackedBatch]]:
        """Micro-batches with trained tokens, filled up to the same number on every rank.

        Raises:
            DataError: on every rank, where one has a sequence that needs too large a mask.
        """
        real = [batch for batch in batches if batch.tokens.num_tokens]
        masked = real if self._kernel == EXACT and self.packing is not Packing.ROWS else []
        numbers = max((largest_mask(batch.row.segments, causal=self._causal) for batch in masked), default=0)
        own = any(batch.row.images is not None for batch in real)
        # Agreed on before the first forward pass, whose own collectives must line up between ranks.
        most, numbers, pictured = self.world.max_ints([len(real), numbers, int(own)])
        refuse_mask(numbers)
        missing = most - len(real)
        filling = [empty_batch(self.device)] * missing if missing else []
        if pictured and self.tower is not None and self.world.processes > 1:
            return [self._with_tower(batch) for batch in real], [self._with_tower(batch) for batch in filling]
        return real, filling

    def _with_tower(self, batch: PackedBatch) -> PackedBatch:
        """A micro-batch whose pass computes the vision part, whether it has images or not."""
        assert self.tower is not None, "asked before"
        if batch.row.images is not None:
            return batch
        return dataclasses.replace(batch, row=dataclasses.replace(batch.row, images=self.tower.no_images))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, tied ones once, and buffers that belong to the model's state."""
        saved = self.module.state_dict().keys()
        yield from ((plain_name(name), tensor) for name, tensor in self.module.named_parameters())
        yield from ((plain_name(name), tensor) for name, tensor in self.module.named_buffers() if name in saved)

    def saved_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Those of `named_tensors` that a checkpoint holds: of a model with adapters those that are trained."""
        whole = self._spec.lora is None
        named = self.named_tensors()
        yield from ((name, tensor) for name, tensor in named if whole or is_trained_with_adapters(name))

    def read(self, batches: Sequence[PackedBatch]) -> ComputedValues:
        """Computes the engine's outputs and gradients as it is now, for the probe."""
        try:
            return read(batches, lambda batch: self.forward(batch)[1], self.parameters)
        except TorchDynamoException as error:
            reason = " ".join(str(error).split("\n")[:2])
            raise ConfigError(
                f"the layers of model {self._spec.model.path!r} cannot be compiled: {type(error).__name__}: {reason}",
                hint="set learner.compile: false",
            ) from error

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
        kernel, self._kernel = self._kernel, EXACT
        # Compiled code of another dtype than that of training would prove nothing, and take as long again.
        self._proving = self._param_dtype != torch.float32
        self._compile()
        try:
            with computing_in(self.module, torch.float32), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                yield
        finally:
            self._kernel, self._proving = kernel, False
            self._compile()

    def recover(self) -> bool:
        """Prepares the engine for another pass after one that broke off, for the probe; False: impossible."""
        return recover(self.module)

    @contextmanager
    def with_short_windows(self, tokens: int) -> Iterator[None]:
        """Limits sliding attention to this many tokens, for the probe."""
        owners = [self.transformer.config.get_text_config(), *self.transformer.modules()]
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
        """Gives every sequence a row from now on, for the probe.

        Raises:
            ImagesRefusedError: the model takes images, which only packed sequences have.
        """
        if self.tower is not None:
            raise ImagesRefusedError(self._spec.model.path, reason)
        self._refuse_to_divide(reason)
        self._refuse_kernel(reason)
        self.why_rows = reason
        self._use(Packing.ROWS)
        self._warn()

    def embedding(self) -> nn.Module:
        """The embedding of the tokens, for the probe."""
        return self.transformer.get_input_embeddings()

    def probe_images(self) -> ProbeImages | None:
        """Images for the prompts of the probe; None: the model takes text alone."""
        return None if self.tower is None else ProbeImages(self.tower.image_token, self.tower.add_synthetic)

    def _use(self, packing: Packing, attention: str | None = None) -> None:
        """Computes in this way from now on."""
        self.packing = packing
        implementation = attention or (self._own_attention if packing is Packing.ROWS else ATTENTION)
        # A vision part has attention without sequences, and keeps its own.
        chosen = implementation if self.tower is None else {"": implementation, "text_config": implementation}
        with quiet_transformers():
            self.transformer.set_attn_implementation(chosen)
        if packing is Packing.ROWS and self.transformer.config._attn_implementation != implementation:
            # transformers does not switch attention outside of its interface; layers that can look here.
            self.transformer.config._attn_implementation = implementation
        self._compile()

    def _compile(self) -> None:
        """Computes with compiled layers where their attention is ours."""
        if self._layers is not None:
            self._layers.use(self.transformer.config._attn_implementation == ATTENTION and not self._proving)

    def _warn(self) -> None:
        """Warns of operations that the packing makes slow or large."""
        heads = getattr(self.transformer.config.get_text_config(), "num_attention_heads", 0)
        warnings = []
        if self._kernel == EXACT:
            warnings.append(
                describe_dense_attention(
                    self.packing,
                    self._own_attention,
                    self.device,
                    self._param_dtype,
                    heads,
                    self._spec.longest,
                    capped=self._capped,
                )
            )
        if self._spec.compile and (reason := self.why_rows or self._why_plain):
            warnings.append(f"its layers are not compiled: {reason}")
        for warning in warnings:
            if warning and self.layout.leads:
                log.warning("model %r: %s", self._spec.model.path, warning)

    def _shard_and_load(self, stored: StoredModel) -> None:
        spec = self._spec
        experts = None
        if (ep := spec.parallel.ep) > 1:
            experts = expert_mesh(self.world, spec.parallel.shards, ep)
            divide_experts(expert_layers(self.module), experts, spec.model.path)
        prepare(
            self.module,
            Preparation(
                shard=self.world.processes > 1 or self._param_dtype != torch.float32,
                param_dtype=self._param_dtype,
                mesh=shard_mesh(self.world, spec.parallel.shards),
                experts=experts,
                trained=spec.optimizer is not None,
                recompute=spec.activation_checkpointing,
                offload_activations=spec.memory.offload_activations,
                reshard_after_forward=spec.memory.reshard_after_forward,
                tower=None if self.tower is None else self.tower.module,
            ),
        )
        new = load_weights(self.module, stored, self.device)
        if new:
            parameters = {plain_name(name): parameter for name, parameter in self.module.named_parameters()}
            if spec.lora is not None:
                fill_adapters({name: parameters[name] for name in new if is_adapter(name)}, spec.lora, spec.seed)
            if others := [name for name in new if not is_adapter(name)]:
                self._fill_new({name: parameters[name] for name in others}, stored.files)

    def _find_tower(self, model: PreTrainedModel, why_rows: str) -> VisionTower | None:
        family, name = family_of(model.config), self._spec.model.path
        backbone = None if family is None else find_backbone(model)
        if family is None or backbone is None:
            return None
        if why_rows:
            raise ImagesRefusedError(name, why_rows)
        return VisionTower(backbone, family, name)

    def _divide(self, config: PreTrainedConfig) -> None:
        """Takes this process's place among those that share a micro-batch."""
        parallel, processes = self._spec.parallel, self.world.processes
        heads = getattr(config.get_text_config(), "num_attention_heads", 0)
        experts = expert_count(config.to_dict())
        check_parallel(parallel, heads=heads, experts=experts, processes=processes, name=self._spec.model.path)
        sp = parallel.sp or 1
        self.layout = Layout.of_neighbours(self.world.process, processes, sp)
        self._exchange = Exchange(self.world.neighbours(sp)) if sp > 1 else None

    def _refuse_to_divide(self, why: str) -> None:
        if why and self._exchange is not None:
            refuse_division(self._spec.model.path, why)

    def _refuse_kernel(self, why_rows: str) -> None:
        """Refuses a kernel of packed attention for sequences that need rows."""
        if why_rows and self._spec.attention not in ("auto", EXACT):
            raise ConfigError(
                f"{ATTENTION_KEY}: {self._spec.attention} is for packed sequences, and those of model "
                f"{self._spec.model.path!r} are computed in rows: {why_rows}",
                hint=f"set {ATTENTION_KEY}: auto",
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
            chosen = part.routed_experts
            copies = divide_over_copies(part.responses, rows.sources)
            self.routers.use(None if chosen is None else chosen[rows.tokens.flatten()], copies)
            return {"input_ids": part.input_ids[0, rows.tokens]}, rows.places[predictors]
        self.routers.use(part.routed_experts, part.responses)
        whole = build_layout_for(self._kernel, part.segments, self.device)
        layout = whole if self._exchange is None else DividedLayout(whole, self._exchange)
        inputs: dict[str, Any] = {
            "input_ids": part.input_ids,
            "position_ids": part.position_ids,
            "layout": Opaque(layout),
        }
        if self.packing is Packing.REPEATED:
            recurrent = build_recurrent_layout(part.segments, self.device, boundaries=self._kernels_separate_sequences)
            inputs[LAYOUT] = Opaque(recurrent)
        return inputs, predictors

    def _image_inputs(self, row: PackedRow, input_ids: Tensor) -> dict[str, Any]:
        """The input for images: as transformers takes them in rows of the probe, else for `VisionTower.embed`."""
        tower, images = self.tower, row.images
        if tower is None or images is None:
            return {}
        if self.packing is not Packing.ROWS:
            exchange = self._exchange
            division = None if exchange is None else DividedImages(exchange, exchange.part * input_ids.shape[1])
            return {"images": Opaque(RowImages(images, division))}
        pixels = {name: value.to(self.device) for name, value in tower.whole_inputs(images.inputs).items()}
        if tower.grid_positions:
            pixels["mm_token_type_ids"] = (input_ids == tower.image_token).int()
        return pixels

    def _gather_output(self, part: RowPart, output: ModelOutput) -> ModelOutput:
        """The output for all trained tokens of a micro-batch, from that of this process's part."""
        if self._exchange is None or part.places is None:
            return output
        fields = [field.name for field in dataclasses.fields(output) if getattr(output, field.name) is not None]
        gathered = self._exchange.gather_outputs(part, [getattr(output, name) for name in fields])
        return ModelOutput(**dict(zip(fields, gathered, strict=True)))
