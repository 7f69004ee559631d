"""The map between a model's full tensors and the Megatron tensors of its processes, in both directions.

Megatron's names lead to the pieces that a process loads. Hugging Face names lead to the boxes that a process
contributes to a copy of the full tensor. Every process can compute both for every other one.

Invariant: the boxes of a copy's processes fill each full tensor once. So tensors that a tensor-parallel group has in
common come from its first process, and those of a layer from its stage. The output layer that is a copy of the
embedding contributes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from rollmesh.learner.engines.megatron.families.family import Family
from rollmesh.learner.engines.megatron.parallel import ParallelPlace, ParallelSizes
from rollmesh.learner.engines.megatron.weight_rules import Form, Geometry, Piece, Pieces, Rule, even_part, pieces_of
from rollmesh.learner.engines.tensors.boxes import Box
from rollmesh.learner.model_files.value_head import HEAD

_OUTPUT = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_HF_LAYER = re.compile(r"(model\.layers\.(\d+)\.)(.+)")
_HEAD_WEIGHT, _HEAD_BIAS = (
    Rule((f"output_layer.{name}",), (f"{HEAD}.{name}",), place="last") for name in ("weight", "bias")
)

ParameterKey = tuple[int, str]
"""The number of a stage's part, and Megatron's name of a parameter in it."""


@dataclass(frozen=True, slots=True)
class FullTensor:
    """A full tensor of the model.

    Attributes:
        name: Hugging Face name.
        shape: of the full tensor.
        kind: which of the two divisions it follows.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["dense", "expert"]


@dataclass(frozen=True, slots=True)
class _Home:
    """The place of a full tensor in Megatron's model.

    Attributes:
        rule: that leads there.
        prefix: of its name.
        stage, part: that have it.
        megatron_prefix: of Megatron's names in that part.
    """

    rule: Rule
    prefix: str
    stage: int
    part: int
    megatron_prefix: str


class WeightMap:
    """The map of a model.

    Args:
        family: of the model.
        hf_config: its configuration in transformers.
        sizes: of the divisions, with the layers of each part.
        described: a tensor without memory for each of the model's (`StoredModel.describe`), in its order.
        padded_vocab: rows of Megatron's embedding and output layer.
        value_model: a scalar head takes the place of the output layer.
        head_bias: that has a constant term.

    Attributes:
        padded_vocab: as given.

    Raises:
        ConfigError: the configuration has what Megatron would compute in another way.
        KeyError: the family has no rule for one of the tensors.
    """

    def __init__(
        self,
        family: Family,
        hf_config: Any,
        sizes: ParallelSizes,
        described: Mapping[str, Tensor],
        padded_vocab: int,
        *,
        value_model: bool = False,
        head_bias: bool = True,
    ) -> None:
        self._sizes, self.padded_vocab = sizes, padded_vocab
        tied = family.settings(hf_config, value_model=value_model).tied
        shapes = {name: tuple(tensor.shape) for name, tensor in described.items()}
        if value_model:
            shapes.pop(_OUTPUT, None)
            shapes |= {f"{HEAD}.weight": (1, hf_config.hidden_size)} | ({f"{HEAD}.bias": (1,)} if head_bias else {})
        self._geometry = Geometry(shapes, hf_config.num_key_value_heads, padded_vocab)
        # Without an output layer of its own, the model's last part has a copy of the embedding.
        self._copy = Rule(("output_layer.weight",), (_EMBEDDING,), Form.VOCABULARY, "last") if tied else None
        rules = [rule for rule in family.rules if not (tied or value_model) or rule.sources != (_OUTPUT,)]
        head = () if not value_model else (_HEAD_WEIGHT, _HEAD_BIAS) if head_bias else (_HEAD_WEIGHT,)
        own = (*rules, *head)
        self._rules = (*own, *([self._copy] if self._copy else ()))
        by_source = {(rule.place == "layer", source): rule for rule in own for source in rule.sources}
        homes = {
            layer: (stage, part, f"decoder.layers.{number}.")
            for part in range(sizes.vpp)
            for stage in range(sizes.pp)
            for number, layer in enumerate(sizes.layers_of(stage, part))
        }
        ends = {"first": (0, 0, ""), "last": (sizes.pp - 1, sizes.vpp - 1, "")}
        self._homes: dict[str, _Home] = {}
        for name in shapes:
            if found := _HF_LAYER.fullmatch(name):
                prefix, layer, rest = found.groups()
                self._homes[name] = _Home(by_source[True, rest], prefix, *homes[int(layer)])
            else:
                rule = by_source[False, name]
                self._homes[name] = _Home(rule, "", *ends[rule.place])
        self._boxes: dict[tuple[str, int, int], list[Box]] = {}

    def pieces(self, place: ParallelPlace, part: int, name: str) -> Pieces:
        """The pieces of a local tensor.

        Args:
            place: of a process.
            part: of the process's layers, 0 .. vpp - 1.
            name: of Megatron, as in that part.

        Raises:
            ConfigError: a size of the division does not divide the tensor.
            KeyError: the family has no rule for the name.
        """
        prefix, rest, rule = self._rule_of(place, part, name)
        return pieces_of(rule, rest, self._sizes, place, self._geometry, prefix)

    def contributes(self, place: ParallelPlace, part: int, name: str) -> bool:
        """True where a local tensor belongs to a copy of its full tensors; False: other processes have the same.

        Args:
            place, part, name: as for `pieces`.
        """
        _, _, rule = self._rule_of(place, part, name)
        return rule is not self._copy and _has_part(rule, place)

    def full_tensors(self) -> list[FullTensor]:
        """All full tensors, tied ones once, in the order of the Hugging Face model."""
        return [
            FullTensor(name, self._geometry.shapes[name], "expert" if home.rule.form.of_experts else "dense")
            for name, home in self._homes.items()
        ]

    def boxes(self, hf_name: str, place: ParallelPlace) -> list[Box]:
        """The boxes that a process contributes to its copy of a full tensor; perhaps none.

        Args:
            hf_name: of the full tensor.
            place: of the process.
        """
        home = self._homes[hf_name]
        if place.pp != home.stage:
            return []
        # Every export asks for those of every process; copies have the same ones.
        key = (hf_name, *((place.ep, place.etp) if home.rule.form.of_experts else (place.tp, 0)))
        if key not in self._boxes:
            self._boxes[key] = [piece.hf_box for _, piece in self._contributed(hf_name, place)]
        return self._boxes[key]

    def local_views(
        self, hf_name: str, place: ParallelPlace, parameters: Mapping[ParameterKey, Tensor]
    ) -> list[Tensor]:
        """The memory of `boxes`, in their order and shapes.

        Args:
            hf_name: of the full tensor.
            place: of this process.
            parameters: of this process, or other tensors of their shapes.

        Returns:
            Views of any strides.
        """
        part = self._homes[hf_name].part
        return [
            piece.view(next(parameters[part, name] for name in names if (part, name) in parameters))
            for names, piece in self._contributed(hf_name, place)
        ]

    def copies(self, hf_name: str) -> int:
        """Copies of a full tensor among all processes."""
        of_experts = self._homes[hf_name].rule.form.of_experts
        return self._sizes.edp if of_experts else self._sizes.dp * self._sizes.cp

    def copy_of(self, hf_name: str, place: ParallelPlace) -> int:
        """The number of the copy of a full tensor that a process belongs to."""
        of_experts = self._homes[hf_name].rule.form.of_experts
        return place.edp if of_experts else place.dp * self._sizes.cp + place.cp

    def _rule_of(self, place: ParallelPlace, part: int, name: str) -> tuple[str, str, Rule]:
        """The prefix of a local tensor's sources, the rest of its own name, and its rule."""
        prefix, rest = "", name
        if found := _LAYER.fullmatch(name):
            prefix, rest = f"model.layers.{self._sizes.layers_of(place.pp, part)[int(found[1])]}.", found[2]
        for rule in self._rules:
            if (rule.place == "layer") == bool(found) and rule.matches(rest):
                return prefix, rest, rule
        raise KeyError(name)

    def _contributed(self, hf_name: str, place: ParallelPlace) -> Iterator[tuple[tuple[str, ...], Piece]]:
        """The pieces that a process contributes, each with the Megatron names that its tensor may have."""
        home, shape = self._homes[hf_name], self._geometry.shapes[hf_name]
        if place.pp != home.stage or not _has_part(home.rule, place):
            return
        experts = even_part(shape[0], self._sizes.ep, "ep", "experts") if home.rule.form.of_experts else 1
        for expert in range(experts):
            names = home.rule.names_of(expert)
            found = pieces_of(home.rule, names[0], self._sizes, place, self._geometry, home.prefix)
            full_names = tuple(home.megatron_prefix + name for name in names)
            yield from ((full_names, piece) for piece in found.pieces if piece.hf_name == hf_name)


def _has_part(rule: Rule, place: ParallelPlace) -> bool:
    """False where the first process of a tensor-parallel group has all of a tensor already."""
    return rule.form is not Form.WHOLE or place.tp == 0
