"""The adapters of a model: which Megatron layer each belongs to, and how its two matrices are divided.

A Megatron layer may be several Hugging Face layers, each with an adapter of its own. Megatron-Core is not needed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollmesh.learner.engines.megatron.weight_rules import Form, Rule
from rollmesh.learner.model_files.adapter_names import A_END, B_END
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import ConfigError

CHILD = "adapters"
"""Name that the adapters of a Megatron layer have within it."""
_WEIGHT = ".weight"
_HF_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)\.weight")
_LINEAR = (Form.QKV, Form.GATE_UP, Form.COLUMNS)


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer of Megatron, in every transformer layer that has one.

    Attributes:
        module: name within the transformer layer.
        sources: Hugging Face layers, in the order in which they lie in it.
        chosen: those that get an adapter.
        form: the way they lie there.
    """

    module: str
    sources: tuple[str, ...]
    chosen: tuple[str, ...]
    form: Form

    @property
    def divides_inputs(self) -> bool:
        """Processes of a tensor-parallel group have columns of the weight; else they have rows."""
        return self.form is Form.COLUMNS

    def rules(self) -> Iterator[Rule]:
        """The rules of its adapters' matrices."""
        a, b = (Form.COLUMNS, Form.WHOLE) if self.divides_inputs else (Form.WHOLE, Form.ROWS)
        for source in self.chosen:
            name = f"{self.module}.{CHILD}.{short_name(source)}"
            yield Rule((f"{name}.a",), (f"{source}{A_END}",), a)
            yield Rule((f"{name}.b",), (f"{source}{B_END}",), b)


def short_name(source: str) -> str:
    """The last part of a layer's name."""
    return source.rpartition(".")[2]


def is_adapter_parameter(name: str) -> bool:
    """True for Megatron's name of a parameter of an adapter."""
    return f".{CHILD}." in name


def adapted_layers(rules: Sequence[Rule], section: LoraSection, names: Iterable[str], model: str) -> list[AdaptedLayer]:
    """The layers that get adapters.

    Args:
        rules: of the model's family.
        section: says which.
        names: of the model's full tensors, those of Hugging Face.
        model: its name, for errors.

    Raises:
        ConfigError: there is no such layer.
    """
    there = {found[2] for name in names if (found := _HF_LAYER.fullmatch(name))}
    layers = []
    for rule in rules:
        sources = tuple(source.removesuffix(_WEIGHT) for source in rule.sources if source.endswith(_WEIGHT))
        if rule.form in _LINEAR and sources and there.issuperset(sources):
            chosen = tuple(
                source for source in sources if section.targets == "all-linear" or short_name(source) in section.targets
            )
            layers.append(AdaptedLayer(rule.names[0].removesuffix(_WEIGHT), sources, chosen, rule.form))
    known = sorted({short_name(source) for layer in layers for source in layer.sources})
    if section.targets != "all-linear" and (unknown := sorted(set(section.targets) - set(known))):
        raise ConfigError(
            f"learner.lora.targets: model {model!r} has no linear layer {unknown[0]!r} in its blocks",
            hint=f"engine megatron adapts {', '.join(known)}; or all-linear",
        )
    return [layer for layer in layers if layer.chosen]


def adapter_shapes(
    layers: Sequence[AdaptedLayer], rank: int, shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, int]]:
    """The shapes of the full matrices of all adapters by name.

    Args:
        layers: of `adapted_layers`.
        rank: of the products.
        shapes: of the model's full tensors, by Hugging Face name.
    """
    chosen = {source for layer in layers for source in layer.chosen}
    found = {}
    for name, shape in shapes.items():
        matched = _HF_LAYER.fullmatch(name)
        if matched and matched[2] in chosen:
            outputs, inputs = shape
            layer = name.removesuffix(_WEIGHT)
            found[layer + A_END] = (rank, inputs)
            found[layer + B_END] = (outputs, rank)
    return found
