"""Forward and backward passes of micro-batches through Megatron's schedules.

Invariants: all processes run the same number of passes, since experts and interleaved stages wait for one another.
Losses arise on the last stage, in one process of each data-parallel rank. The others contribute zeros, with a gradient
of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from rollmesh.learner.algorithms.types import ModelOutput
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.megatron.computing.heads import ResultHead
from rollmesh.learner.engines.megatron.computing.inputs import MegatronInputs, padded_tokens, prepare_inputs
from rollmesh.learner.engines.megatron.computing.routers import Routers
from rollmesh.learner.engines.megatron.parallel import ParallelPlace, ParallelSizes

Consume = Callable[[int, ModelOutput], Tensor]
"""From a micro-batch's number and its output to a differentiable share of the loss, 0-d."""


class Passes:
    """Runs micro-batches.

    Args:
        chunks: of the model, wrapped for training or not.
        head: the last layer, where this process has it.
        sizes, place: of the process.
        device: of the model.
        routers: of its experts.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        head: ResultHead | None,
        sizes: ParallelSizes,
        place: ParallelPlace,
        device: torch.device,
        routers: Routers,
    ) -> None:
        self._routers = routers
        self._chunks, self._head = list(chunks), head
        self._sizes, self._place, self._device = sizes, place, device
        self._run = get_forward_backward_func()

    @property
    def multiple(self) -> int:
        """Micro-batches come in multiples of this number: interleaved stages take turns in groups."""
        return self._sizes.pp if self._sizes.vpp > 1 else 1

    def run(self, batches: Sequence[PackedBatch], consume: Consume, *, backward: bool) -> None:
        """Runs micro-batches; collective.

        Args:
            batches: with trained tokens; as many in every process.
            consume: called for each on the last stage, in order.
            backward: run the backward passes too.
        """
        if not batches:
            return
        # Interleaved stages exchange tensors of one shape alone.
        length = max(padded_tokens(batch, self._sizes) for batch in batches) if self._sizes.vpp > 1 else 0
        inputs = [prepare_inputs(batch, self._sizes, self._place, self._device, length) for batch in batches]
        iterators = [_Numbered(inputs) for _ in self._chunks]
        step = _ForwardStep(self._head, self._routers, consume)
        single = len(self._chunks) == 1
        self._run(
            forward_step_func=step,
            data_iterator=iterators[0] if single else iterators,
            model=self._chunks[0] if single else self._chunks,
            num_microbatches=len(inputs),
            seq_length=length or 1,
            micro_batch_size=1,
            forward_only=not backward,
        )


class _Numbered(Iterator[tuple[int, MegatronInputs]]):
    """Micro-batches with their numbers."""

    def __init__(self, inputs: Sequence[MegatronInputs]) -> None:
        self._inputs = enumerate(inputs)

    def __next__(self) -> tuple[int, MegatronInputs]:
        return next(self._inputs)


class _ForwardStep:
    """A forward pass of one micro-batch through one chunk, as Megatron's schedules call it."""

    def __init__(self, head: ResultHead | None, routers: Routers, consume: Consume) -> None:
        self._head, self._routers, self._consume = head, routers, consume

    def __call__(self, data_iterator: _Numbered, model: GPTModel) -> tuple[Tensor, Callable[[Tensor], Any]]:
        number, inputs = next(data_iterator)
        if self._head is not None:
            self._head.inputs = inputs
        with self._routers.passing(inputs):
            out = model(
                inputs.input_ids,
                inputs.position_ids,
                None,
                packed_seq_params=inputs.sequences,
            )
        if out.requires_grad:
            # Before anything of its backward pass: stages have passed other micro-batches on since.
            out.register_hook(lambda _: self._routers.resume(inputs))

        def loss_of(results: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            assert self._head is not None, "only the last stage has results"
            share = self._consume(number, self._head.output(results))
            # No tokens: the loss is normalized already.
            return share, torch.zeros((), dtype=torch.int, device=share.device), {}

        return out, loss_of
