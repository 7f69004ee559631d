"""A step of the learner on fake tensors and a fake process group of the real size, watched by torch's memory tracker.

The model is prepared by the engine's own `prepare`, and its output is computed by the engine's own functions. Only
small inputs are allocated. The tracker follows one pass without gradient, and one micro-batch's forward and backward
pass, and reads what that leaves to the optimizer. A former micro-batch, and an optimizer step, run before it begins:
the tracker counts the first step's states at their unsharded size. The update is left out too, for fake operations over
sharded tensors take their global shape, and it allocates nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedConfig

from rollmesh.learner.engines.fsdp2.language_model import LanguageModel
from rollmesh.learner.engines.fsdp2.opaque import Opaque
from rollmesh.learner.engines.fsdp2.preparation.fsdp import Preparation, prepare
from rollmesh.learner.engines.fsdp2.preparation.shard_mesh import mesh_of_all
from rollmesh.learner.engines.output import layer
from rollmesh.learner.engines.output.layer import LogitMemory
from rollmesh.learner.engines.output.logit_form import read_logit_form
from rollmesh.learner.engines.output.softmax_pieces import Targets
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.planning.architecture import build_on_meta
from rollmesh.planning.block_costs import grouped_products_by_shape, model_inputs
from rollmesh.planning.fsdp_memory import FsdpSetup
from rollmesh.planning.role_memory import INFERENCE, UPDATE, LogitRoom, Phase

_TOTAL = "Total"


@dataclass(frozen=True, slots=True)
class TracedStep:
    """Bytes of one rank as the tracker counts them, and the largest of the phases that the formulas have for it.

    Attributes:
        inference: peak of a forward pass without gradient.
        micro_batch: peak of a forward and a backward pass.
        optimizer: held between the last backward pass and the update.
    """

    inference: int
    micro_batch: int
    optimizer: int

    def compared(self, planned: Iterable[Phase]) -> Iterator[tuple[str, int, int]]:
        """Name, bytes traced and bytes planned of each part of a step.

        Args:
            planned: phases of the role's use.
        """
        largest: dict[str, int] = {}
        for phase in planned:
            name = phase.name if phase.name in (INFERENCE, UPDATE) else "micro-batch"
            largest[name] = max(largest.get(name, 0), phase.total)
        traced = {INFERENCE: self.inference, "micro-batch": self.micro_batch, UPDATE: self.optimizer}
        yield from ((name, traced[name], nbytes) for name, nbytes in largest.items())


def trace_step(config: PreTrainedConfig, setup: FsdpSetup, lora: LoraSection | None = None) -> TracedStep:
    """Memory of one rank in a step of a trained language model with a micro-batch.

    Args:
        config: of the model.
        setup: of its role.
        lora: an adapter is trained instead.

    Raises:
        ConfigError: this process has a process group already.
    """
    if dist.is_initialized():
        raise ConfigError("a trace needs a process without a process group", hint="run `rollmesh plan` by itself")
    dtype = torch.float32 if setup.compute_bytes == torch.float32.itemsize else torch.bfloat16
    with ExitStack() as stack:
        if setup.sharded:
            dist.init_process_group("fake", rank=0, world_size=setup.shards, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        whole = build_on_meta(copy.deepcopy(config), lora)
        inputs = model_inputs(whole, setup.tokens, setup.sp)
        model = LanguageModel(whole, read_logit_form(whole), LogitMemory(setup.logits.kept))
        how = Preparation(
            setup.sharded,
            dtype,
            mesh=mesh_of_all("cpu") if setup.sharded else None,
            recompute=setup.recompute,
            reshard_after_forward=setup.reshard,
        )
        prepare(model, how)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(grouped_products_by_shape())
        stack.enter_context(_tiles_of(setup.logits))
        tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
        model.to_empty(device="cpu")
        if tied and not setup.sharded:
            # Tied weights of a plain model come apart where it moves.
            whole.get_output_embeddings().weight = whole.get_input_embeddings().weight
        return _follow(model, setup, inputs)


def _follow(model: nn.Module, setup: FsdpSetup, inputs: dict[str, Any]) -> TracedStep:
    targets = Opaque(Targets(torch.zeros(setup.tokens, dtype=torch.int64)))
    optimizer = torch.optim.AdamW([found for found in model.parameters() if found.requires_grad], fused=True)

    def forward() -> Tensor:
        log_probs: Tensor = model(**inputs, logits_to_keep=torch.arange(setup.tokens), targets=targets)[0]
        return log_probs

    def micro_batch() -> None:
        forward().sum().backward()

    micro_batch()
    optimizer.step()
    optimizer.zero_grad()
    with _tracking(model, optimizer, setup) as tracker, torch.no_grad():
        forward()
    inference = _total(tracker, "peak")
    if setup.micro_batches > 1:
        micro_batch()
    with _tracking(model, optimizer, setup) as tracker:
        micro_batch()
        left = _total(tracker, "current")
    return TracedStep(inference, _total(tracker, "peak"), left)


class _TotalsOfModel(MemTracker):
    """Counts what exists, and does not tell gradients from other tensors: torch's hooks refuse frozen parameters."""

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = False) -> tuple[int, int]:
        del install_grad_hooks
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)


class _TotalsOfShards(_TotalsOfModel, FSDPMemTracker):
    """The same for a sharded model."""


def _tracking(model: nn.Module, optimizer: Optimizer, setup: FsdpSetup) -> MemTracker:
    if setup.sharded:
        return _TotalsOfShards(model, optimizer)
    tracker = _TotalsOfModel()
    tracker.track_external(model, optimizer)
    return tracker


def _total(tracker: MemTracker, moment: Literal["current", "peak"]) -> int:
    return sum(device[_TOTAL] for device in tracker.get_tracker_snapshot(moment).values())


@contextmanager
def _tiles_of(room: LogitRoom) -> Iterator[None]:
    """Logits come in tiles of the planned device, within the context: a few large ones on CUDA."""
    before = dict(layer.TILES)
    layer.TILES["cpu"] = (room.rows, room.tile // room.rows)
    try:
        yield
    finally:
        layer.TILES.update(before)
