"""The start-up probe of the Megatron engine: it must compute what transformers computes, or the model is refused.

The truth is transformers' eager code in float32, one sequence at a time, on parameters that FSDP divides over the same
processes. It is loaded for the probe alone: while it lasts a process holds 8 bytes more per parameter of its share.
Gradients are compared by fingerprints: for each full tensor its product with a fixed pattern, to which every process
adds what its boxes give. So nothing is gathered.

In bfloat16 the engine cannot compute in float32, so only what exceeds rounding is found there.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.metrics import Metrics
from rollmesh.learner.algorithms.types import GlobalCounts, LossOutput, ModelOutput, TokenBatch
from rollmesh.learner.batching.types import PackedBatch
from rollmesh.learner.engines.fsdp2.language_model import LanguageModelRunner
from rollmesh.learner.engines.fsdp2.probe import read
from rollmesh.learner.engines.fsdp2.runner import ModelRunner
from rollmesh.learner.engines.fsdp2.shards import divided_tensors
from rollmesh.learner.engines.fsdp2.value_model import ValueModelRunner
from rollmesh.learner.engines.interface import Engine, EngineSpec
from rollmesh.learner.engines.probe_batches import ProbeBatches, not_zero, output_weights, relative_rms
from rollmesh.learner.engines.tensors.boxes import Box
from rollmesh.learner.engines.tolerances import (
    REFUSED_HINT,
    ROUNDED_HINT,
    Difference,
    Evidence,
    problem_of_rounding,
    problem_of_structure,
)
from rollmesh.learner.engines.world import World
from rollmesh.mesh.config.learner import MemorySection
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.mesh.errors import DataError

# Steps of the pattern's phase in each dimension: no small number of them makes a full turn.
_PHASES = (0.7, 1.3, 2.1)
# Elements that are multiplied at a time: in float64, with their pattern, 64 MiB.
_AT_ONCE = 1 << 22


class Fingerprints:
    """Sums over full tensors, each process with what it has.

    Args:
        names: of all tensors, in an order that all processes share.
    """

    def __init__(self, names: list[str]) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._sums = torch.zeros(2, len(names), dtype=torch.float64)

    def add(self, name: str, box: Box, values: Tensor) -> None:
        """Adds a box of a tensor, which no other process adds.

        Args:
            name: of the tensor.
            box: in it.
            values: in the box, of any dtype.
        """
        if values.numel() > _AT_ONCE:
            axis = max(range(values.dim()), key=values.shape.__getitem__)
            start, stop = box[axis].start, box[axis].stop
            middle = (start + stop) // 2
            halves = values.tensor_split([middle - start], axis)
            for half, side in zip(halves, (slice(start, middle), slice(middle, stop)), strict=True):
                self.add(name, (*box[:axis], side, *box[axis + 1 :]), half)
            return
        phase = torch.zeros((), device=values.device)
        for side, step in zip(box, _PHASES, strict=False):
            phase = phase[..., None] + torch.arange(side.start, side.stop, device=values.device) * step
        wide = values.detach().double()
        place = self._places[name]
        self._sums[0, place] += float((wide * phase.cos()).sum())
        self._sums[1, place] += float(wide.square().sum())

    def total(self, world: World) -> Tensor:
        """Products and sums of squares over all processes, float64 [2, T]; collective."""
        return world.sum(self._sums.to(world.device)).cpu()


def truth_of(
    spec: EngineSpec, world: World, batches: ProbeBatches, names: list[str], *, value_model: bool
) -> tuple[Tensor, Tensor | None]:
    """Outputs and fingerprints of the gradient as transformers computes them; collective.

    Args:
        spec: of the engine that is probed.
        world: all processes.
        batches: of the probe.
        names: of the model's tensors.
        value_model: it has a scalar head.

    Returns:
        float32 [R], and float64 [2, T]; none for a model that is not trained.
    """
    plain = replace(
        spec,
        parallel=ParallelSection(),
        memory=MemorySection(),
        param_dtype="float32",
        activation_checkpointing=False,
        offload=False,
    )
    runner: ModelRunner = (ValueModelRunner if value_model else LanguageModelRunner)(plain, world)
    parameters = runner.parameters if spec.optimizer is not None else []
    prints = Fingerprints(names)
    with runner.in_eager_rows():
        found = read(batches.alone, lambda batch: runner.forward(batch)[1], parameters)
    if spec.optimizer is None:
        return found.outputs, None
    named = dict(runner.named_tensors())
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    for tensor in divided_tensors(named.items(), world.processes):
        gradient = found.gradients.get(places.get(id(named[tensor.name]), -1))
        copy, boxes = tensor.place(world.process)
        if gradient is not None and copy == 0:
            for box in boxes:
                prints.add(tensor.name, box, gradient)
    return found.outputs, prints.total(world)


def found_by(engine: Engine, batches: ProbeBatches) -> tuple[Tensor, float]:
    """Outputs of the packed sequences, and how much their neighbours matter; collective.

    Args:
        engine: that is probed.
        batches: of the probe.

    Returns:
        float32 [R], and the leak: see `Evidence`.
    """
    packed, among = (_outputs(engine, batch) for batch in (batches.packed, batches.among_others))
    return packed, float(relative_rms(among[batches.witness], packed[batches.witness], packed))


def weighted_sum(engine: Engine) -> Loss:
    """The loss of which the probe compares the gradient, where every data-parallel rank has the same sequences."""

    def loss(output: ModelOutput, tokens: TokenBatch, counts: GlobalCounts) -> LossOutput:
        del tokens, counts
        outputs = _differentiable(output)
        return LossOutput((outputs * output_weights()(outputs)).sum() / engine.layout.dp_size, Metrics())

    return loss


def _outputs(engine: Engine, batch: PackedBatch) -> Tensor:
    found = engine.infer([batch])
    own = _differentiable(found[0]) if found else torch.zeros(0, device=engine.device)
    return engine.gather(own)[0]


def _differentiable(output: ModelOutput) -> Tensor:
    return output.values if output.values is not None else output.policy()[0]


def judge(
    name: str, spec: EngineSpec, truth: tuple[Tensor, Tensor | None], found: tuple[Tensor, Tensor | None], leak: float
) -> Evidence:
    """The evidence, where it is within the tolerances.

    Args:
        name: of the model, for errors.
        spec: of the engine.
        truth: of `truth_of`.
        found: the same of the engine.
        leak: see `Evidence`.

    Raises:
        DataError: it is not.
    """
    outputs = float(relative_rms(found[0], truth[0], truth[0]))
    gradient = None
    if truth[1] is not None and found[1] is not None:
        norm = not_zero(truth[1][1].sum().sqrt())
        # A fixed pattern's product with an error is about as large as the error times the pattern's mean square.
        products = (found[1][0] - truth[1][0]).norm() * math.sqrt(2.0)
        norms = (found[1][1].sqrt() - truth[1][1].sqrt()).norm()
        gradient = float(max(products, norms) / norm)
    difference = Difference(outputs, gradient)
    rounded = spec.param_dtype != "float32"
    problem = problem_of_rounding(difference) if rounded else problem_of_structure(difference, leak, "float32")
    if problem is not None:
        hint = ROUNDED_HINT if rounded else REFUSED_HINT
        raise DataError(f"{name} cannot be trained right by engine megatron: {problem}", hint=hint)
    return Evidence(difference, leak, difference if rounded else None)
