"""Memory of one rank of the learner, phase by phase: arithmetic over parameter groups.

The formulas follow what `learner.engines.fsdp2` allocates; docs/planning.md derives them. `trace` compares them with
torch's memory tracker, and tests with the resident memory of real steps. A phase is the moment of its largest sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from rollmesh.planning.shape import BlockCosts, ModelShape, ParameterGroup

MASTER = 4
"""Bytes of an element of master weights, gradients and whatever else is float32."""

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
GATHERED, REDUCTION = "gathered parameters", "unsharded gradients"
ACTIVATIONS, LOGITS = "activations", "logits"
INFERENCE, UPDATE = "inference", "optimizer"
"""Phases without a backward pass."""

COMPONENTS = (PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, REDUCTION, ACTIVATIONS, LOGITS)


@dataclass(frozen=True, slots=True)
class Phase:
    """A moment of a step: bytes by component."""

    name: str
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class LogitRoom:
    """The memory for logits, as `learner/engines/fsdp2/output/layer.py` takes it.

    Attributes:
        kept: bytes of float32 logits that may stay until the backward pass.
        tile: elements of a tile.
        rows: tokens of a tile at most.
    """

    kept: int
    tile: int
    rows: int


@dataclass(frozen=True, slots=True)
class Moments:
    """Bytes of an optimizer's state for each parameter: of matrices in blocks, and of all else."""

    matrices: int = 2 * MASTER
    rest: int = 2 * MASTER


@dataclass(frozen=True, slots=True)
class RoleSetup:
    """A model of the learner, and the way in which it is trained.

    Attributes:
        name: of the role.
        shape, costs: of the model; costs by kind of block, in the compute dtype.
        trained: it has gradients and an optimizer.
        shards: into which its parameters are divided.
        sharded: FSDP2 is used, on a single rank too.
        compute_bytes: of an element of the compute dtype.
        recompute: blocks keep their input alone for the backward pass; `selective`: and the outputs of products and of
            attention.
        host_inputs: these inputs wait in host memory.
        offload: its parameters rest in host memory between its uses.
        offload_optimizer: the optimizer's state too, of which the optimizer's step takes two pieces at a time.
        offload_gradients: its gradients too, between the backward passes and the optimizer's step.
        tokens: of a micro-batch, those of this rank alone where `sp` ranks divide it.
        micro_batches: of an optimizer step; from the second one on gradients are there already.
        logits: room for them.
        moments: of the optimizer.
        sp: ranks that divide a micro-batch.
        reshard: what was gathered for the forward pass is gathered again for the backward pass.
        sync_once: gradients stay whole on every rank until a step's last micro-batch.
    """

    name: str
    shape: ModelShape
    costs: tuple[BlockCosts, ...]
    trained: bool
    shards: int
    sharded: bool
    compute_bytes: int
    recompute: bool | Literal["selective"]
    offload: bool
    tokens: int
    micro_batches: int
    logits: LogitRoom
    moments: Moments = Moments()
    sync_once: bool = False
    sp: int = 1
    host_inputs: bool = False
    offload_optimizer: bool = False
    offload_gradients: bool = False
    reshard: bool = True

    @property
    def parameters(self) -> int:
        """Bytes of this rank's parameters: float32 masters, or the compute dtype where they are not trained."""
        return self.shape.shard(self.shards) * (MASTER if self.trained else self.compute_bytes)

    @property
    def hidden_states(self) -> int:
        """Bytes of the hidden states of a micro-batch."""
        return self.tokens * self.shape.hidden * self.compute_bytes

    @property
    def optimizer(self) -> int:
        """Bytes of this rank's optimizer state."""
        matrices = sum(block.matrices.shard(self.shards) for block in self.shape.blocks)
        rest = self.shape.shard(self.shards) - matrices
        return matrices * self.moments.matrices + rest * self.moments.rest


def on_host(setup: RoleSetup) -> int:
    """Bytes of host memory for what is not on the device all the time; kept by the engine until the next time."""
    optimizer = setup.optimizer if setup.offload_optimizer else 0
    gradients = setup.parameters if setup.offload_gradients else 0
    return setup.parameters * setup.offload + (optimizer + gradients) * setup.trained


def inputs_on_host(setup: RoleSetup) -> int:
    """Bytes of host memory for inputs of blocks that wait for a backward pass; kept for the next pass of any role."""
    waits = setup.trained and setup.host_inputs and setup.recompute is True
    return len(setup.shape.layers) * setup.hidden_states if waits else 0


def staged(setup: RoleSetup) -> int:
    """Bytes of host memory for the copy from which a checkpoint is written; kept from one to the next."""
    return setup.parameters + setup.optimizer if setup.trained else 0


def resting(setup: RoleSetup) -> dict[str, int]:
    """Components between the uses of a role; a step ends without gradients."""
    return ({} if setup.offload else {PARAMETERS: setup.parameters}) | _moments(setup)


def _in_use(setup: RoleSetup) -> dict[str, int]:
    """Components while it computes."""
    return {PARAMETERS: setup.parameters} | _moments(setup)


def _moments(setup: RoleSetup) -> dict[str, int]:
    return {OPTIMIZER: setup.optimizer} if setup.trained and not setup.offload_optimizer else {}


def phases(setup: RoleSetup) -> Iterator[Phase]:
    """The phases of a role's use, its own resting parts included."""
    yield _inference(setup)
    if not setup.trained:
        return
    yield _forward(setup)
    yield _output_layer(setup)
    yield _largest_block(setup)
    yield _last_gradients(setup)
    states = {PARAMETERS: setup.parameters, GRADIENTS: setup.parameters}
    if not setup.offload_optimizer:
        yield Phase(UPDATE, states | {OPTIMIZER: setup.optimizer})
        return
    yield Phase(UPDATE, states | {OPTIMIZER: _two_pieces(setup)})
    yield Phase("checkpoint", {PARAMETERS: setup.parameters, OPTIMIZER: setup.optimizer})


def _two_pieces(setup: RoleSetup) -> int:
    """The largest two pieces in which an optimizer's state comes from the host: of blocks, and of other parameters."""
    root = [ParameterGroup((rows,)).shard(setup.shards) * setup.moments.rest for rows in setup.shape.root.tensors]
    blocks = [_state_of_block(setup, block) for block in setup.shape.blocks]
    return sum(sorted(root + blocks)[-2:])


def _state_of_block(setup: RoleSetup, block: ParameterGroup) -> int:
    matrices = block.matrices.shard(setup.shards)
    return matrices * setup.moments.matrices + (block.shard(setup.shards) - matrices) * setup.moments.rest


def _inference(setup: RoleSetup) -> Phase:
    """A pass without gradient, at the embedding, in the largest block, or at the output layer."""
    shape = setup.shape
    most = max((cost.inference.at(setup.tokens) for cost in setup.costs), default=0)
    moments = (
        (shape.embedding, 0, 0),
        (shape.largest_block, most, 0),
        (shape.output_layer, 0, _logits(setup, gradient=False)),
    )
    return max((_moment_of_inference(setup, *moment) for moment in moments), key=lambda phase: phase.total)


def _moment_of_inference(setup: RoleSetup, near: int, working: int, logits: int) -> Phase:
    # Gathered parameters stay in the buffer from which they were copied, too, until the next ones come.
    gathered, activations = _gathered(setup, 2 * near), working + 2 * setup.hidden_states
    return Phase(INFERENCE, _in_use(setup) | {GATHERED: gathered, ACTIVATIONS: activations, LOGITS: logits})


def _forward(setup: RoleSetup) -> Phase:
    """The first block: the root's parameters are still in the buffer from which they were copied."""
    root = setup.shape.rest * setup.compute_bytes if setup.sharded else 0
    most = max((cost.inference.at(setup.tokens) for cost in setup.costs), default=0)
    parts = _held(setup) | {GATHERED: _gathered(setup) + root, ACTIVATIONS: setup.hidden_states + most}
    return Phase("forward", parts)


def _output_layer(setup: RoleSetup) -> Phase:
    """The backward pass through logits, which makes the gradients of hidden states and of the layer's weight."""
    shape, compute = setup.shape, setup.compute_bytes
    parts = _held(setup) | {ACTIVATIONS: _kept(setup, len(shape.layers)) + _last_norm(setup)}
    weight = shape.output * compute
    last = shape.blocks[-1].elements if shape.layers else 0
    gathered = _gathered(setup, shape.output_layer + last)
    moments = [
        Phase("output layer", parts | {GATHERED: gathered, REDUCTION: weight, LOGITS: _logits(setup, gradient=True)})
    ]
    if setup.sharded and shape.output_layer:
        gathered = _gathered(setup, last)
        moments.append(Phase("output layer", parts | {GATHERED: gathered, REDUCTION: weight + MASTER * shape.output}))
    return max(moments, key=lambda phase: phase.total)


def _logits(setup: RoleSetup, *, gradient: bool) -> int:
    """Every token may be a trained one."""
    shape, tokens = setup.shape, setup.tokens
    if not shape.output:
        return 0
    if not shape.tiled_output:
        whole = tokens * shape.vocabulary * setup.compute_bytes
        return whole * (1 + gradient) + 2 * MASTER * setup.logits.tile
    rows = min(setup.logits.rows, tokens)
    columns = min(shape.vocabulary, setup.logits.tile // rows)
    tile = MASTER * rows * columns
    # A product of bfloat16 exists in addition to the tile that it is copied into.
    product = 0 if setup.compute_bytes == MASTER else tile
    if not gradient:
        return 2 * tile + product
    kept = MASTER * tokens * shape.vocabulary
    kept = kept if kept <= setup.logits.kept else 0
    # The gradients of hidden states and of a tile's weights are summed in float32.
    sums = MASTER * shape.hidden * (tokens + columns)
    # A tile's gradient is rounded, and its product with states or weights added to a sum.
    rounded = 2 * rows * columns + MASTER * shape.hidden * max(rows, columns) if product else 0
    return 2 * tile + sums + max(rounded, 0 if kept else product) + kept


def _largest_block(setup: RoleSetup) -> Phase:
    """The backward pass through the block at which memory is largest."""
    return max(_blocks_backward(setup), key=lambda phase: phase.total, default=Phase("backward", _held(setup)))


def _blocks_backward(setup: RoleSetup) -> Iterator[Phase]:
    shape, compute = setup.shape, setup.compute_bytes
    blocks = shape.blocks
    built = shape.output * compute
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
            behind = blocks[place + 1].elements if place + 1 < len(blocks) else shape.output_layer
            tied = built if shape.tied else 0
            parts |= {GATHERED: _gathered(setup, near), REDUCTION: tied + MASTER * behind}
            if setup.micro_batches == 1:
                done = blocks[place + 1 :]
                parts |= {GRADIENTS: MASTER * sum(block.shard(setup.shards) for block in done)}
        elif fresh:
            parts |= {GRADIENTS: built}
            built += blocks[place].elements * MASTER
        elif shape.tied:
            parts |= {REDUCTION: shape.output * compute}
        yield Phase("backward", parts | {ACTIVATIONS: kept + working})


def _last_gradients(setup: RoleSetup) -> Phase:
    """The end of the backward pass: the embedding's gradient, and the reduction of the root's gradients."""
    root, compute, blocks = setup.shape.root, setup.compute_bytes, setup.shape.blocks
    # A tied weight's first gradient waits for the second one.
    fresh = compute * (root.elements + setup.shape.output if setup.shape.tied else root.elements)
    parts = _held(setup)
    if not setup.sharded:
        if setup.micro_batches == 1:
            return Phase("last gradients", parts | {GRADIENTS: setup.parameters - MASTER * root.elements + fresh})
        largest = fresh if setup.shape.tied else compute * root.largest
        return Phase("last gradients", parts | {REDUCTION: largest})
    if setup.micro_batches == 1:
        parts |= {GRADIENTS: setup.parameters - MASTER * root.shard(setup.shards)}
    first = MASTER * blocks[0].elements if blocks else 0
    last = root.elements if setup.shape.tied else setup.shape.embedding + setup.shape.rest
    made = compute * (last + setup.shape.output if setup.shape.tied else last)
    # Gradients are copied into one float32 buffer; then it is reduced, while the last of them is still held.
    reduced = MASTER * last + compute * max(last, root.largest) + MASTER * last // setup.shards
    moments = (
        Phase("last gradients", parts | {GATHERED: _gathered(setup, setup.shape.embedding), REDUCTION: made + first}),
        Phase("last gradients", parts | {REDUCTION: reduced}),
    )
    return max(moments, key=lambda phase: phase.total)


def _held(setup: RoleSetup) -> dict[str, int]:
    """States during a backward pass, and gradients of former micro-batches."""
    if setup.micro_batches == 1:
        return _in_use(setup) | {GRADIENTS: 0}
    whole = setup.sync_once and setup.sharded
    return _in_use(setup) | {GRADIENTS: MASTER * setup.shape.elements if whole else setup.parameters}


def _gathered(setup: RoleSetup, near: int | None = None) -> int:
    """The root's parameters, and those in use or gathered ahead; without resharding all of them.

    Args:
        setup: of the role.
        near: elements in addition to the root's in a backward pass; None: a forward pass, in which the next is gathered
            ahead.
    """
    shape = setup.shape
    if not setup.sharded:
        return 0
    if near is None:
        near = 2 * max(shape.largest_block, shape.embedding, shape.output_layer)
    elif not setup.reshard:
        near = shape.elements - shape.rest
    return setup.compute_bytes * (shape.rest + near)


def _kept(setup: RoleSetup, blocks: int) -> int:
    """Kept for the backward pass by the first `blocks` blocks."""
    if setup.recompute is True:
        return (min(blocks, 2) if setup.host_inputs else blocks) * setup.hidden_states
    costs = [setup.costs[kind] for kind in setup.shape.layers[:blocks]]
    if setup.recompute:
        return sum(setup.hidden_states + cost.products.at(setup.tokens) for cost in costs)
    return sum(cost.saved.at(setup.tokens) for cost in costs)


def _last_norm(setup: RoleSetup) -> int:
    """The last norm computes in float32; its result is kept, and once more as the input of the output layer."""
    return setup.tokens * setup.shape.hidden * MASTER + 2 * setup.hidden_states
