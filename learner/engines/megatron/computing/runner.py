"""A model on its ranks, built and filled by Megatron, and the passes of micro-batches through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from rollmesh.learner.algorithms.types import ModelOutput
from rollmesh.learner.batching.empty import empty_batch
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.interface import EngineSpec
from rollmesh.learner.engines.megatron.adapters.layers import add_adapters, without_adapters
from rollmesh.learner.engines.megatron.adapters.rules import AdaptedLayer
from rollmesh.learner.engines.megatron.computing.data_parallel import wrap_chunks
from rollmesh.learner.engines.megatron.computing.heads import LogProbHead, ResultHead, ValueHead
from rollmesh.learner.engines.megatron.computing.model import build_chunks, build_config, head_of, named_parameters
from rollmesh.learner.engines.megatron.computing.passes import Passes
from rollmesh.learner.engines.megatron.computing.routers import Routers
from rollmesh.learner.engines.megatron.families.family import Settings
from rollmesh.learner.engines.megatron.parallel import ParallelSizes
from rollmesh.learner.engines.megatron.weights.weight_map import WeightMap
from rollmesh.learner.engines.model_cost import cost_of
from rollmesh.learner.engines.output.layer import LogitMemory
from rollmesh.learner.engines.world import World
from rollmesh.learner.model_files.stored_model import StoredModel


class MegatronRunner:
    """A language model or a value model.

    Args:
        spec: of the engine.
        world: all processes.
        sizes: of the divisions.
        stored: the model's folder, open.
        settings: of the model for Megatron.
        weights: of the model.
        adapters: layers that get one, and alone are trained.
        value_model: it has a scalar head.

    Attributes:
        layout, device: as of the engine.
        chunks: this process's parts of the model; wrapped where it is trained.
        parameters: by number of the chunk and Megatron's name.
        routers: of its experts.
        passes: runs micro-batches.
        cost: operations of a forward pass.
    """

    def __init__(
        self,
        spec: EngineSpec,
        world: World,
        sizes: ParallelSizes,
        stored: StoredModel,
        settings: Settings,
        weights: WeightMap,
        adapters: Sequence[AdaptedLayer] = (),
        *,
        value_model: bool,
    ) -> None:
        self.world, self.device = world, world.device
        self._sizes, self._value_model = sizes, value_model
        self._head_bias = spec.head_bias
        self.place = sizes.place_of(world.process)
        self.layout = sizes.layout_of(world.process)
        self._memory = LogitMemory(spec.memory.logits_mib << 20, rounded=not spec.float32_logits)
        self._entropy_gradient = spec.entropy_gradient
        self._vocabulary = stored.model.config.get_text_config().vocab_size
        self._config = build_config(spec, settings, sizes, self.device)
        padding_id = cast(nn.Embedding, stored.model.get_input_embeddings()).padding_idx
        chunks = build_chunks(
            self._config,
            settings,
            weights.padded_vocab,
            sizes,
            self.place,
            self._make_head,
            self.device,
            padding_id,
            adapted=spec.lora is not None,
        )
        if spec.lora is not None:
            add_adapters(chunks, adapters, spec.lora)
        self._head = head_of(chunks)
        if value_model and self._head is not None:
            # It is new, and trained whole next to adapters.
            self._head.requires_grad_()
        self.parameters = named_parameters(chunks)
        self.chunks: list[Any] = list(chunks)
        if spec.optimizer is None:
            for parameter in self.parameters.values():
                parameter.requires_grad_(False)
        else:
            # Moves parameters into buffers of its own.
            self.chunks = wrap_chunks(chunks, self._config, spec)
        frequency = self._config.moe_layer_freq
        self.routers = Routers(
            chunks,
            list(map(bool, frequency)) if isinstance(frequency, list) else [],
            self._config.num_moe_experts or 0,
            spec.router,
            sizes,
            self.place,
            self.layout,
            world,
        )
        self.passes = Passes(self.chunks, self._head, sizes, self.place, self.device, self.routers)
        text = stored.model.config.get_text_config()
        shapes = [(name, tuple(tensor.shape)) for name, tensor in stored.model.named_parameters()]
        cost = cost_of(text, shapes, tied=bool(text.tie_word_embeddings) and not value_model)
        # A prompt is computed again for each of its responses.
        self.cost = replace(cost, stateful=cost.weights)

    def fill_up(self, batches: Sequence[PackedBatch]) -> tuple[list[PackedBatch], list[PackedBatch]]:
        """Micro-batches with trained tokens, filled up to the same number on every rank."""
        real = [batch for batch in batches if batch.tokens.num_tokens]
        most = self.world.max_int(len(real))
        most = -(-most // self.passes.multiple) * self.passes.multiple
        missing = most - len(real)
        return real, [empty_batch(self.device)] * missing if missing else []

    def infer(self, batches: Sequence[PackedBatch], *, sum_pi_squared: bool, adapter: bool) -> list[ModelOutput]:
        """Outputs of micro-batches, one after another, where they arise; without adapter those of the base."""
        found: list[ModelOutput] = []

        def consume(_: int, output: ModelOutput) -> Tensor:
            found.append(output)
            return torch.zeros((), device=self.device)

        if isinstance(self._head, LogProbHead):
            self._head.sum_pi_squared = sum_pi_squared
        try:
            with nullcontext() if adapter else without_adapters(self.chunks):
                self.passes.run(batches, consume, backward=False)
        finally:
            if isinstance(self._head, LogProbHead):
                self._head.sum_pi_squared = False
        return found

    @contextmanager
    def finalizing(self, finalize: Callable[..., None]) -> Iterator[None]:
        """Has gradients summed at the end of a schedule, within the context."""
        self._config.finalize_model_grads_func = finalize
        try:
            yield
        finally:
            self._config.finalize_model_grads_func = None

    def empty_output(self, *, sum_pi_squared: bool) -> ModelOutput:
        """The output for no tokens."""
        none = torch.zeros(0, device=self.device)
        if self._value_model:
            return ModelOutput(values=none)
        return ModelOutput(log_probs=none, entropy=none, sum_pi_squared=none if sum_pi_squared else None)

    def _make_head(self, layer: Any, groups: ProcessGroupCollection) -> ResultHead:
        rest = {"sequence_parallel": self._sizes.sequence_parallel, "leads": self.layout.has_results}
        if self._value_model:
            return ValueHead(self._config.hidden_size, self.device, groups, bias=self._head_bias, **rest)
        head = LogProbHead(layer, groups, self._vocabulary, self._memory, **rest)
        head.entropy_gradient = self._entropy_gradient
        return head
