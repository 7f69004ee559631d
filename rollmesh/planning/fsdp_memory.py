"""Memory of one rank of FSDP2, phase by phase: arithmetic over parameter groups.

The formulas follow what `learner.engines.fsdp2` allocates; docs/planning.md derives them. `trace` compares them with
torch's memory tracker, and tests with the resident memory of real steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rollmesh.planning.role_memory import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    INFERENCE,
    LOGITS,
    MASTER,
    OPTIMIZER,
    PARAMETERS,
    REDUCTION,
    UPDATE,
    Phase,
    RoleSetup,
)
from rollmesh.planning.shape import BlockCosts, ModelShape, ParameterGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSetup(RoleSetup):
    """A model that FSDP2 divides.

    `RoleSetup.offload_optimizer`: the optimizer's step takes two pieces of the state at a time.

    Attributes:
        costs: of the model, by kind of block, in the compute dtype.
        ranks: of the learner.
        shards: into which its parameters are divided.
        sharded: FSDP2 is used, on a single rank too.
        host_inputs: the inputs of recomputed blocks wait in host memory.
        sp: ranks that divide a micro-batch.
        ep: ranks that have the experts of a layer together.
        reshard: what was gathered for the forward pass is gathered again for the backward pass.
        sync_once: gradients stay whole on every rank until a step's last micro-batch.
    """

    costs: tuple[BlockCosts, ...]
    ranks: int
    shards: int
    sharded: bool
    sync_once: bool = False
    sp: int = 1
    ep: int = 1
    host_inputs: bool = False
    reshard: bool = True

    @property
    def own(self) -> ModelShape:
        """The model as this rank gathers it: of experts its part alone."""
        return self.shape if self.ep == 1 else _with_experts_divided(self.shape, self.ep)

    @property
    def parameters(self) -> int:
        """Float32 masters, or the compute dtype where they are not trained."""
        masters = self.own.trained_shard(self.shards) if self.trained else 0
        return masters * MASTER + (self.own.shard(self.shards) - masters) * self.compute_bytes

    @property
    def gradients(self) -> int:
        """As large as masters."""
        return self.own.trained_shard(self.shards) * MASTER

    @property
    def hidden_states(self) -> int:
        """Bytes of the hidden states of a micro-batch."""
        return self.tokens * self.own.hidden * self.compute_bytes

    @property
    def optimizer(self) -> int:
        """Bytes of this rank's moments."""
        own = self.own
        matrices = sum(own.layers.count(kind) * of.matrices.shard(self.shards) for kind, of in enumerate(own.kinds))
        rest = self.own.trained_shard(self.shards) - matrices
        return matrices * self.moments.matrices + rest * self.moments.rest

    @property
    def staged(self) -> int:
        """Masters and moments."""
        return self.gradients + self.optimizer if self.trained else 0

    @property
    def inputs_on_host(self) -> int:
        """The inputs of all blocks, where they wait there."""
        waits = self.trained and self.host_inputs and self.recompute is True
        return len(self.own.layers) * self.hidden_states if waits else 0

    @property
    def parts(self) -> int:
        """Ranks of Ulysses's exchanges."""
        return self.sp

    @property
    def division(self) -> str:
        """`FSDP2, full shard`, or the number of copies."""
        if not self.sharded:
            return "not sharded"
        copies = self.ranks // self.shards
        experts = f", ep {self.ep}" if self.ep > 1 else ""
        return f"FSDP2, {'full shard' if copies == 1 else f'{copies} copies of {self.shards} shard(s)'}{experts}"

    def division_json(self) -> dict[str, Any]:
        """Shards, and if there are any."""
        division = {"engine": "fsdp2", "shards": self.shards, "sharded": self.sharded}
        return division | ({"ep": self.ep} if self.ep > 1 else {})

    def phases(self) -> Iterator[Phase]:
        """Inference, and for a trained role each part of a step."""
        return _phases(self)


@lru_cache
def _with_experts_divided(shape: ModelShape, parts: int) -> ModelShape:
    return shape.with_experts_divided(parts)


def _phases(setup: FsdpSetup) -> Iterator[Phase]:
    yield _inference(setup)
    if not setup.trained:
        return
    yield _forward(setup)
    yield _output_layer(setup)
    yield _largest_block(setup)
    if not setup.own.adapted:
        yield _last_gradients(setup)
    states = {PARAMETERS: setup.parameters, GRADIENTS: setup.gradients}
    if not setup.offload_optimizer:
        yield Phase(UPDATE, states | {OPTIMIZER: setup.optimizer})
        return
    yield Phase(UPDATE, states | {OPTIMIZER: _two_pieces(setup)})
    yield Phase("checkpoint", {PARAMETERS: setup.parameters, OPTIMIZER: setup.optimizer})


def _two_pieces(setup: FsdpSetup) -> int:
    """The largest two pieces in which an optimizer's state comes from the host: of blocks, and of other parameters."""
    root = [ParameterGroup((rows,)).shard(setup.shards) * setup.moments.rest for rows in setup.own.root.tensors]
    blocks = [_state_of_block(setup, block) for block in setup.own.blocks]
    return sum(sorted(root + blocks)[-2:])


def _state_of_block(setup: FsdpSetup, block: ParameterGroup) -> int:
    matrices = block.matrices.shard(setup.shards)
    rest = block.trained.shard(setup.shards) - matrices
    return matrices * setup.moments.matrices + rest * setup.moments.rest


def _inference(setup: FsdpSetup) -> Phase:
    """A pass without gradient, at the embedding, in the largest block, or at the output layer."""
    shape = setup.own
    most = max((cost.inference.at(setup.tokens) for cost in setup.costs), default=0)
    moments = (
        (shape.embedding, 0, 0),
        (shape.largest_block, most, 0),
        (shape.output_layer, 0, _logits(setup, gradient=False)),
    )
    return max((_moment_of_inference(setup, *moment) for moment in moments), key=lambda phase: phase.total)


def _moment_of_inference(setup: FsdpSetup, near: int, working: int, logits: int) -> Phase:
    # Gathered parameters stay in the buffer from which they were copied, too, until the next ones come.
    gathered, activations = _gathered(setup, 2 * near), working + 2 * setup.hidden_states
    return Phase(INFERENCE, setup.in_use | {GATHERED: gathered, ACTIVATIONS: activations, LOGITS: logits})


def _forward(setup: FsdpSetup) -> Phase:
    """The first block: the root's parameters are still in the buffer from which they were copied."""
    root = setup.own.rest * setup.compute_bytes if setup.sharded else 0
    most = max((cost.inference.at(setup.tokens) for cost in setup.costs), default=0)
    parts = _held(setup) | {GATHERED: _gathered(setup) + root, ACTIVATIONS: setup.hidden_states + most}
    return Phase("forward", parts)


def _output_layer(setup: FsdpSetup) -> Phase:
    """The backward pass through logits, which makes the gradients of hidden states and of the layer's weight."""
    shape, compute = setup.own, setup.compute_bytes
    parts = _held(setup) | {ACTIVATIONS: _kept(setup, len(shape.layers)) + _last_norm(setup)}
    weight = shape.output_gradient * compute
    last = shape.blocks[-1].elements if shape.layers else 0
    gathered = _gathered(setup, shape.output_layer + last)
    moments = [
        Phase("output layer", parts | {GATHERED: gathered, REDUCTION: weight, LOGITS: _logits(setup, gradient=True)})
    ]
    if setup.sharded and shape.output_layer:
        gathered = _gathered(setup, last)
        moments.append(
            Phase("output layer", parts | {GATHERED: gathered, REDUCTION: weight + MASTER * shape.output_gradient})
        )
    return max(moments, key=lambda phase: phase.total)


def _logits(setup: FsdpSetup, *, gradient: bool) -> int:
    shape, tokens = setup.own, setup.tokens
    if not shape.output:
        return 0
    if not shape.tiled_output:
        whole = tokens * shape.vocabulary * setup.compute_bytes
        return whole * (1 + gradient) + 2 * MASTER * setup.logits.tile
    return setup.logits.tiles(tokens, shape.vocabulary, shape.hidden, setup.compute_bytes, gradient=gradient)


def _largest_block(setup: FsdpSetup) -> Phase:
    """The backward pass through the block at which memory is largest."""
    return max(_blocks_backward(setup), key=lambda phase: phase.total, default=Phase("backward", _held(setup)))


def _blocks_backward(setup: FsdpSetup) -> Iterator[Phase]:
    shape, compute = setup.own, setup.compute_bytes
    blocks = shape.blocks
    built, reduced = shape.output_gradient * compute, 0
    untied = 0 if shape.tied else shape.output_gradient
    held = _held(setup)
    for place in reversed(range(len(blocks))):
        cost = setup.costs[shape.layers[place]]
        fresh = setup.sharded or setup.micro_batches == 1
        working = (cost.working if fresh else cost.accumulating).at(setup.tokens)
        if setup.recompute is not True:
            # Counted with what is kept.
            counted = cost.products if setup.recompute else cost.saved
            working = max(0, working - counted.at(setup.tokens))
        kept = _kept(setup, place + 1)
        parts = dict(held)
        if setup.sharded:
            near = sum(block.elements for block in blocks[max(place - 1, 0) : place + 1])
            following = blocks[place + 1].trained.elements if place + 1 < len(blocks) else untied
            tied = built if shape.tied else 0
            parts |= {GATHERED: _gathered(setup, near), REDUCTION: tied + MASTER * following}
            if setup.micro_batches == 1:
                parts |= {GRADIENTS: MASTER * reduced}
                reduced += blocks[place].trained.shard(setup.shards)
        elif fresh:
            parts |= {GRADIENTS: built}
            built += blocks[place].trained.elements * MASTER
        elif shape.tied:
            parts |= {REDUCTION: shape.output_gradient * compute}
        yield Phase("backward", parts | {ACTIVATIONS: kept + working})


def _last_gradients(setup: FsdpSetup) -> Phase:
    """The end of the backward pass: the embedding's gradient, and the reduction of the root's gradients."""
    root, compute, blocks = setup.own.root, setup.compute_bytes, setup.own.blocks
    # A tied weight's first gradient waits for the second one.
    fresh = compute * (root.elements + setup.own.output if setup.own.tied else root.elements)
    parts = _held(setup)
    if not setup.sharded:
        if setup.micro_batches == 1:
            return Phase("last gradients", parts | {GRADIENTS: setup.gradients - MASTER * root.elements + fresh})
        largest = fresh if setup.own.tied else compute * root.largest
        return Phase("last gradients", parts | {REDUCTION: largest})
    if setup.micro_batches == 1:
        parts |= {GRADIENTS: setup.gradients - MASTER * root.shard(setup.shards)}
    first = MASTER * blocks[0].trained.elements if blocks else 0
    last = root.elements if setup.own.tied else setup.own.embedding + setup.own.rest
    made = compute * (last + setup.own.output if setup.own.tied else last)
    # Gradients are copied into one float32 buffer; then it is reduced, while the last of them is still held.
    reduced = MASTER * last + compute * max(last, root.largest) + MASTER * last // setup.shards
    moments = (
        Phase("last gradients", parts | {GATHERED: _gathered(setup, setup.own.embedding), REDUCTION: made + first}),
        Phase("last gradients", parts | {REDUCTION: reduced}),
    )
    return max(moments, key=lambda phase: phase.total)


def _held(setup: FsdpSetup) -> dict[str, int]:
    """States during a backward pass, and gradients of former micro-batches."""
    if setup.micro_batches == 1:
        return setup.in_use | {GRADIENTS: 0}
    whole = setup.sync_once and setup.sharded
    return setup.in_use | {GRADIENTS: MASTER * setup.own.trained if whole else setup.gradients}


def _gathered(setup: FsdpSetup, near: int | None = None) -> int:
    """The root's parameters, and those in use or gathered ahead; without resharding all of them.

    Args:
        setup: of the role.
        near: elements in addition to the root's in a backward pass; None: a forward pass, in which the next is gathered
            ahead.
    """
    shape = setup.own
    if not setup.sharded:
        return 0
    if near is None:
        near = 2 * max(shape.largest_block, shape.embedding, shape.output_layer)
    elif not setup.reshard:
        near = shape.elements - shape.rest
    return setup.compute_bytes * (shape.rest + near)


def _kept(setup: FsdpSetup, blocks: int) -> int:
    """Kept for the backward pass by the first `blocks` blocks."""
    if setup.recompute is True:
        return (min(blocks, 2) if setup.host_inputs else blocks) * setup.hidden_states
    costs = [setup.costs[kind] for kind in setup.own.layers[:blocks]]
    if setup.recompute:
        return sum(setup.hidden_states + cost.products.at(setup.tokens) for cost in costs)
    return sum(cost.saved.at(setup.tokens) for cost in costs)


def _last_norm(setup: FsdpSetup) -> int:
    """The last norm computes in float32; its result is kept, and once more as the input of the output layer."""
    return setup.tokens * setup.own.hidden * MASTER + 2 * setup.hidden_states
