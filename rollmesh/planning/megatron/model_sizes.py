"""The sizes of a model as Megatron's engine divides it: plain numbers, from a family's rules."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollmesh.learner.engines.megatron.adapters.rules import adapted_layers, adapter_shapes
from rollmesh.learner.engines.megatron.families.registry import family_of
from rollmesh.learner.engines.megatron.requirements import ModelFacts
from rollmesh.learner.engines.megatron.weight_rules import Form, Rule
from rollmesh.mesh.config.lora import LoraSection

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Elements:
    """Numbers of elements, by the processes that divide them.

    Attributes:
        whole: each process of a tensor-parallel group has all of them.
        tensor: divided among these.
        expert: divided among expert-parallel processes, and among those of each expert.
        largest_tensor, largest_expert: the largest tensors that are made at once; of experts, those of a layer.
    """

    whole: int = 0
    tensor: int = 0
    expert: int = 0
    largest_tensor: int = 0
    largest_expert: int = 0

    def __add__(self, other: Elements) -> Elements:
        return Elements(
            self.whole + other.whole,
            self.tensor + other.tensor,
            self.expert + other.expert,
            max(self.largest_tensor, other.largest_tensor),
            max(self.largest_expert, other.largest_expert),
        )

    @property
    def total(self) -> int:
        """Elements in all."""
        return self.whole + self.tensor + self.expert


@dataclass(frozen=True, slots=True)
class Widths:
    """Widths of a layer's activations, in elements of a token; those of what a layer does not have are 0.

    Attributes:
        hidden: of the hidden states.
        queries, keys: of all heads; values are as wide as keys.
        heads: of the queries.
        head_norms: each head's queries and keys are normalized.
        feed_forward: of an MLP, or of all shared experts.
        experts: of a layer.
        chosen: experts of a token.
        expert: within one.
    """

    hidden: int
    queries: int
    keys: int
    heads: int
    head_norms: bool = False
    feed_forward: int = 0
    experts: int = 0
    chosen: int = 0
    expert: int = 0


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """A layer: its parameters, those of adapters in addition, and the widths of its activations."""

    elements: Elements
    widths: Widths
    adapters: Elements = Elements()


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model.

    Attributes:
        facts: that a division has to respect.
        hidden: width of the hidden states.
        kinds: one for every kind of layer.
        layers: kind of every layer, in order.
        embedding: on the first stage.
        output: output layer on the last stage, tied or not; of a value model, its head.
        norm: the last one, on the last stage.
        tied: the output layer is the embedding, which both of these stages have.
        value_model: its output are values.
        adapted: adapters alone are trained.
    """

    facts: ModelFacts
    hidden: int
    kinds: tuple[LayerSizes, ...]
    layers: tuple[int, ...]
    embedding: Elements
    output: Elements
    norm: Elements
    tied: bool
    value_model: bool = False
    adapted: bool = False

    @property
    def elements(self) -> int:
        """Parameters in all, tied ones once, without adapters."""
        output = 0 if self.tied else self.output.total
        return self.embedding.total + self.elements_of(range(len(self.layers))).total + self.norm.total + output

    def elements_of(self, layers: range) -> Elements:
        """Parameters of some layers."""
        return sum((self.kinds[self.layers[layer]].elements for layer in layers), Elements())

    def adapters_of(self, layers: range) -> Elements:
        """Parameters of the adapters of some layers."""
        return sum((self.kinds[self.layers[layer]].adapters for layer in layers), Elements())

    def as_value_model(self) -> ModelSizes:
        """The same with a scalar head in place of the output layer."""
        return replace(self, output=Elements(whole=self.hidden + 1), tied=False, value_model=True)


def read_sizes(
    name: str, config: Any, shapes: Mapping[str, Sequence[int]], lora: LoraSection | None = None
) -> ModelSizes:
    """The sizes of a model.

    Args:
        name: for messages.
        config: of transformers.
        shapes: of all parameters, by their names in transformers.
        lora: adapters are trained instead.

    Raises:
        ConfigError: Megatron's engine does not know such models, or they have no layer for an adapter.
    """
    family = family_of(config)
    settings = family.settings(config)
    rules = {(rule.place == "layer", source): rule for rule in family.rules for source in rule.sources}
    found: list[Elements] = [Elements()] * config.num_hidden_layers
    ends = {source: Elements() for source in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")}
    made: Counter[tuple[int, Rule]] = Counter()
    for parameter, shape in shapes.items():
        count = math.prod(shape)
        if in_layer := _LAYER.fullmatch(parameter):
            number, rest = int(in_layer[1]), in_layer[2]
            rule = rules[True, rest]
            # Sources of one rule lie in one tensor.
            made[number, rule] += count
            found[number] += _elements(rule.form, count, made[number, rule])
        else:
            ends[parameter] += _elements(rules[False, parameter].form, count, count)
    embedding, norm, output = ends.values()
    adapters = _adapters(name, family.rules, shapes, lora) if lora is not None else {}
    layers = [
        LayerSizes(elements, _widths(settings.transformer, elements.expert > 0), adapters.get(number, Elements()))
        for number, elements in enumerate(found)
    ]
    kinds = tuple(dict.fromkeys(layers))
    return ModelSizes(
        facts=ModelFacts.read(name, config.to_dict()),
        hidden=config.hidden_size,
        kinds=kinds,
        layers=tuple(map(kinds.index, layers)),
        embedding=embedding,
        output=embedding if settings.tied else output,
        norm=norm,
        tied=settings.tied,
        adapted=lora is not None,
    )


def _adapters(
    name: str, rules: Sequence[Rule], shapes: Mapping[str, Sequence[int]], lora: LoraSection
) -> dict[int, Elements]:
    """Elements of adapters by the number of their layer."""
    adapted = adapted_layers(rules, lora, shapes, name)
    by_source = {rule.sources[0]: rule.form for layer in adapted for rule in layer.rules()}
    found: dict[int, Elements] = {}
    for matrix, shape in adapter_shapes(adapted, lora.rank, shapes).items():
        in_layer = _LAYER.fullmatch(matrix)
        assert in_layer is not None, "adapters are within layers"
        number, count = int(in_layer[1]), math.prod(shape)
        found[number] = found.get(number, Elements()) + _elements(by_source[in_layer[2]], count, count)
    return found


def _elements(form: Form, count: int, whole_tensor: int) -> Elements:
    if form is Form.WHOLE:
        return Elements(whole=count)
    if form.of_experts:
        return Elements(expert=count, largest_expert=whole_tensor)
    return Elements(tensor=count, largest_tensor=whole_tensor)


def _widths(transformer: Mapping[str, Any], experts: bool) -> Widths:
    """Widths of a layer from the arguments of Megatron's `TransformerConfig`."""
    heads, groups, width = (transformer[key] for key in ("num_attention_heads", "num_query_groups", "kv_channels"))
    own = Widths(transformer["hidden_size"], heads * width, groups * width, heads, transformer["qk_layernorm"])
    if not experts:
        return replace(own, feed_forward=transformer["ffn_hidden_size"])
    return replace(
        own,
        experts=transformer["num_moe_experts"],
        chosen=transformer["moe_router_topk"],
        expert=transformer["moe_ffn_hidden_size"],
    )
