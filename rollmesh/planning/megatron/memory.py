"""Memory of one rank under Megatron-Core, phase by phase: that of the stage with the largest sum.

Buffers are as in Megatron-Core 0.16.1. Parameters are in the compute dtype, and gradients in float32 buffers of the
same length (`distributed/param_and_grad_buffer.py`), from a step's first micro-batch on. The distributed optimizer
divides float32 masters and two moments over data-parallel and context-parallel ranks, those of experts over the copies
of each expert (`optimizer/distrib_optimizer.py`). Float32 parameters are their own masters. A weight's gradient exists
for a moment in the compute dtype too, before it is added to its buffer.

With adapters, activations count as if weights had gradients too. Not counted are the padding of a vocabulary and of
buffers. Where several roles have stages, each counts with the stage that needs most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rollmesh.learner.engines.megatron.parallel import ParallelSizes
from rollmesh.planning.megatron.activations import FUSED, PLAIN, Share, kept, passing, working
from rollmesh.planning.megatron.model_sizes import Elements, LayerSizes, ModelSizes
from rollmesh.planning.megatron.schedule import most_in_flight, parts_in_flight, waiting
from rollmesh.planning.role_memory import (
    ACTIVATIONS,
    FRESH,
    GRADIENTS,
    INFERENCE,
    LOGITS,
    MASTER,
    OPTIMIZER,
    PARAMETERS,
    UPDATE,
    Phase,
    RoleSetup,
)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the model.

    Attributes:
        number: pipeline rank.
        layers: of each of its parts.
        elements: of all processes that divide it, those of adapters too.
        trained: those of them that training changes.
        parameters: elements of one rank.
        in_flight: passes through a part of its layers that wait for their backward pass, at most.
        phases: of one of its ranks.
    """

    number: int
    layers: tuple[range, ...]
    elements: Elements
    trained: Elements
    parameters: int
    in_flight: int
    phases: tuple[Phase, ...]

    @property
    def largest(self) -> Phase:
        """The phase of its largest sum."""
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(frozen=True, kw_only=True)
class MegatronSetup(RoleSetup):
    """A model that Megatron's engine divides.

    Attributes:
        model: its sizes.
        sizes: of the divisions.
        fused: layers are those of CUDA.
    """

    model: ModelSizes
    sizes: ParallelSizes
    fused: bool = True

    @property
    def least(self) -> int:
        """Bytes of a rank if all ranks divided everything evenly: no division needs less."""
        masters = 0 if self.compute_bytes == MASTER else MASTER
        trains = self.trained and not self.model.adapted
        each = self.compute_bytes + (MASTER + masters + self.moments.rest) * trains
        return each * self.model.elements // self.sizes.processes

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, in order."""
        return tuple(self._stage(number) for number in range(self.sizes.pp))

    @property
    def worst(self) -> Stage:
        """The stage with the largest sum."""
        return max(self.stages, key=lambda stage: stage.largest.total)

    @property
    def parameters(self) -> int:
        """Those of the worst stage."""
        return self.compute_bytes * self.worst.parameters

    @property
    def gradients(self) -> int:
        """Those of the worst stage: of all that it trains, before and after ranks have summed them."""
        return MASTER * local(self.worst.trained, self.sizes)

    @property
    def optimizer(self) -> int:
        """That of the worst stage: masters that are not the parameters themselves, and moments."""
        return self._state(self.worst.trained)

    @property
    def staged(self) -> int:
        """Each rank writes the masters and moments of its own range."""
        return (MASTER + self.moments.rest) * owned(self.worst.trained, self.sizes) if self.trained else 0

    @property
    def inputs_on_host(self) -> int:
        """Activations stay on the device."""
        return 0

    @property
    def parts(self) -> int:
        """Context-parallel ranks; those of a tensor-parallel group compute the same tokens."""
        return self.sizes.cp

    @property
    def division(self) -> str:
        """`Megatron: tp 2, pp 2, dp 2`: the sizes that are not 1."""
        named = self.sizes_given | ({"dp": self.sizes.dp} if self.sizes.dp > 1 else {})
        return f"Megatron: {', '.join(f'{key} {value}' for key, value in named.items()) or 'not divided'}"

    @property
    def sizes_given(self) -> dict[str, int]:
        """Keys of `learner.parallel` that are not 1."""
        experts = ("ep", "etp") if self.model.facts.experts else ()
        values = {key: getattr(self.sizes, key) for key in ("tp", "pp", "vpp", "cp", *experts)}
        return {key: value for key, value in values.items() if value > 1}

    @property
    def waiting(self) -> float:
        """The time that stages wait, as a share of the time that they compute."""
        return waiting(self.sizes, self.micro_batches)

    def division_json(self) -> dict[str, Any]:
        """Sizes, how long stages wait, and what each stage has."""
        return {
            "engine": "megatron",
            "parallel": asdict(self.sizes) | {"dp": self.sizes.dp, "edp": self.sizes.edp},
            "waiting": self.waiting,
            "stages": [
                {
                    "stage": stage.number,
                    "layers": sum(map(len, stage.layers)),
                    "parameters": stage.parameters,
                    "parts_in_flight": stage.in_flight,
                    "peak_bytes": stage.largest.total,
                    "phase": stage.largest.name,
                }
                for stage in self.stages
            ],
        }

    def phases(self) -> Iterator[Phase]:
        """Those of the worst stage."""
        return iter(self.worst.phases)

    def _stage(self, number: int) -> Stage:
        layers = tuple(self.sizes.layers_of(number, part) for part in range(self.sizes.vpp))
        elements = sum(map(self.model.elements_of, layers), Elements())
        if number == 0:
            elements += self.model.embedding
        if number == self.sizes.pp - 1:
            elements += self.model.norm
            # One tensor is enough where both ends are on the same stage.
            elements += self.model.output if self.sizes.pp > 1 or not self.model.tied else Elements()
        adapters = sum(map(self.model.adapters_of, layers), Elements())
        trained = adapters if self.model.adapted else elements
        elements += adapters
        in_flight = parts_in_flight(self.sizes, number, self.micro_batches)
        return Stage(
            number,
            layers,
            elements,
            trained,
            local(elements, self.sizes),
            in_flight,
            tuple(self._phases(number, layers, elements, trained)),
        )

    def _phases(self, number: int, layers: tuple[range, ...], elements: Elements, trained: Elements) -> Iterator[Phase]:
        state = {} if not self.trained or self.offload_optimizer else {OPTIMIZER: self._state(trained)}
        states = {PARAMETERS: self.compute_bytes * local(elements, self.sizes)} | state
        numbers = {self.model.layers[layer] for part in layers for layer in part}
        own = [self.model.kinds[number] for number in sorted(numbers)]
        yield self._inference(number, own, states)
        if not self.trained:
            return
        states |= {GRADIENTS: MASTER * local(trained, self.sizes)}
        waiting = self._waiting(number, layers)
        if number == self.sizes.pp - 1:
            yield self._output_layer(states, waiting)
        yield self._largest_layer(own, states, waiting)
        if number == 0 and not self.model.adapted:
            yield self._last_gradients(states, waiting)
        yield Phase(UPDATE, states | {OPTIMIZER: self._state(trained)})

    def _state(self, elements: Elements) -> int:
        masters = 0 if self.compute_bytes == MASTER else MASTER
        return (masters + self.moments.rest) * owned(elements, self.sizes)

    @property
    def _share(self) -> Share:
        return Share(self.tokens, self.sizes, self.compute_bytes, FUSED if self.fused else PLAIN)

    def _waiting(self, number: int, layers: tuple[range, ...]) -> int:
        """Bytes that micro-batches in flight keep: of all layers, and what a part has handed on."""
        share, last = self._share, self.sizes.pp * self.sizes.vpp - 1
        each = [kept(share, kind.widths, self.recompute) for kind in self.model.kinds]
        parts = []
        for part, own in enumerate(layers):
            handed_on = 0 if part * self.sizes.pp + number == last else share.outside(self.model.hidden)
            parts.append(handed_on + sum(each[self.model.layers[layer]] for layer in own))
        return most_in_flight(self.sizes, number, self.micro_batches, parts)

    def _inference(self, number: int, layers: list[LayerSizes], states: dict[str, int]) -> Phase:
        """A pass without gradient: in the largest layer, or at the output layer."""
        share = self._share
        most = max((passing(share, layer.widths) for layer in layers), default=0)
        moments = [{ACTIVATIONS: most}]
        if number == self.sizes.pp - 1:
            moments.append({ACTIVATIONS: self._last_states, LOGITS: self._logits(gradient=False)})
        return max((Phase(INFERENCE, states | moment) for moment in moments), key=lambda phase: phase.total)

    def _output_layer(self, states: dict[str, int], waiting: int) -> Phase:
        """The backward pass through logits, and the gradient of the layer's weight."""
        weight = 0 if self.model.adapted else self.compute_bytes * _part(self.model.output, self.sizes)
        logits = self._logits(gradient=True)
        return Phase("output layer", states | {FRESH: weight, ACTIVATIONS: waiting + self._last_states, LOGITS: logits})

    def _largest_layer(self, layers: list[LayerSizes], states: dict[str, int], waiting: int) -> Phase:
        share = self._share
        moments = [
            Phase(
                "backward",
                states
                | {
                    FRESH: self.compute_bytes
                    * _part(layer.adapters if self.model.adapted else layer.elements, self.sizes),
                    ACTIVATIONS: waiting + working(share, layer.widths, self.recompute),
                },
            )
            for layer in layers
        ]
        return max(moments, key=lambda phase: phase.total)

    def _last_gradients(self, states: dict[str, int], waiting: int) -> Phase:
        """The embedding's gradient, which has a second one where the output layer on the same stage is tied to it."""
        both = 1 + (self.model.tied and self.sizes.pp == 1)
        gradient = both * self.compute_bytes * _part(self.model.embedding, self.sizes)
        hidden = self._share.outside(self.model.hidden)
        return Phase("last gradients", states | {FRESH: gradient, ACTIVATIONS: waiting + hidden})

    @property
    def _last_states(self) -> int:
        """The last norm's input and output; then all tokens' states, and those whose output is wanted."""
        share = self._share
        return share.outside(2 * self.model.hidden) + share.whole(2 * self.model.hidden)

    def _logits(self, *, gradient: bool) -> int:
        if self.model.value_model:
            # Values are float32, and so are the states that they are computed from.
            return MASTER * self.tokens * self.model.hidden * (1 + gradient)
        columns = self.model.facts.vocabulary // self.sizes.tp
        return self.logits.tiles(self.tokens, columns, self.model.hidden, self.compute_bytes, gradient=gradient)


def local(elements: Elements, sizes: ParallelSizes) -> int:
    """Elements of a stage that one of its ranks has."""
    return elements.whole + elements.tensor // sizes.tp + elements.expert // (sizes.ep * sizes.etp)


def owned(elements: Elements, sizes: ParallelSizes) -> int:
    """Elements of a stage that the optimizer of one of its ranks updates."""
    dense = elements.whole + elements.tensor // sizes.tp
    experts = elements.expert // (sizes.ep * sizes.etp)
    return -(-dense // (sizes.dp * sizes.cp)) + -(-experts // sizes.edp)


def _part(elements: Elements, sizes: ParallelSizes) -> int:
    """Elements of the largest gradient that is made at once."""
    return max(elements.largest_tensor // sizes.tp, elements.largest_expert // (sizes.ep * sizes.etp))
