"""The sizes of a model that its memory follows from; plain numbers, without torch.

Sums are kept: a search makes hundreds of plans of the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple


class Rows(NamedTuple):
    """A tensor as FSDP2 divides it: by rows.

    Attributes:
        number: of rows.
        width: elements of each.
        experts: each row is an expert's.
        parts: different ranks have different rows; those here are of one of so many parts.
    """

    number: int
    width: int
    experts: bool = False
    parts: int = 1

    @property
    def elements(self) -> int:
        """Elements of the tensor."""
        return self.number * self.width


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are gathered, and whose gradients are reduced, together.

    Attributes:
        tensors: those that training changes.
        frozen: those that stay as they were loaded, next to an adapter.
    """

    tensors: tuple[Rows, ...]
    frozen: tuple[Rows, ...] = ()

    @cached_property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(rows.elements for rows in self._all)

    @cached_property
    def trained(self) -> ParameterGroup:
        """Without what is frozen."""
        return ParameterGroup(self.tensors)

    @cached_property
    def matrices(self) -> ParameterGroup:
        """The tensors that training changes, without vectors."""
        return ParameterGroup(tuple(rows for rows in self.tensors if rows.width > 1))

    @cached_property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max((rows.elements for rows in self._all), default=0)

    def shard(self, ranks: int) -> int:
        """Elements on the first rank: rows are divided as `torch.chunk` does, so it has the most."""
        return sum(-(-rows.number // (ranks // rows.parts)) * rows.width for rows in self._all)

    def count(self, elements: int) -> int:
        """Tensors of this size."""
        return sum(rows.elements == elements for rows in self._all)

    @cached_property
    def _all(self) -> tuple[Rows, ...]:
        return self.tensors + self.frozen

    def with_experts_divided(self, parts: int) -> ParameterGroup:
        """The parameters that a rank gathers where its neighbours have other experts."""
        trained, frozen = (
            tuple(rows._replace(number=rows.number // parts, parts=parts) if rows.experts else rows for rows in group)
            for group in (self.tensors, self.frozen)
        )
        return ParameterGroup(trained, frozen)

    @property
    def experts(self) -> int:
        """Experts of a layer; 0: there are none."""
        return max((rows.number for rows in self._all if rows.experts), default=0)


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Bytes that grow with the number of tokens."""

    fixed: float
    per_token: float

    def at(self, tokens: int) -> int:
        """Bytes for the given number of tokens; never negative."""
        return max(0, round(self.fixed + self.per_token * tokens))


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """Memory of one transformer block in one dtype, in addition to its parameters and its input.

    Attributes:
        saved: kept from the forward pass for the backward pass.
        products: of these, the outputs of products and of attention, as selective recomputation keeps them.
        working: most during its forward and its backward pass together, its fresh gradients included.
        accumulating: the same where it has gradients already, to which new ones are added.
        inference: most during a forward pass without gradient.
    """

    saved: TokenCost
    products: TokenCost
    working: TokenCost
    accumulating: TokenCost
    inference: TokenCost


@dataclass(frozen=True)
class ModelShape:
    """A model.

    Attributes:
        name, model_type: from the configuration, and `config.json`.
        hidden: width of the hidden states.
        heads: of its attention's queries.
        vocabulary: rows of the output layer.
        kinds: one group for every kind of block.
        layers: kind of every block, in order.
        root: parameters outside of the blocks: embedding, last norm, output layer unless it is tied.
        output: elements of the output layer, tied or not; 0 for a value model.
        tiled_output: its logits can be computed tile by tile.
        kv_elements: elements of keys and values that a token has over all layers, as `transformers` keeps them.
        compressed_kv_elements: as engines with latent attention keep them.
    """

    name: str
    model_type: str
    hidden: int
    heads: int
    vocabulary: int
    kinds: tuple[ParameterGroup, ...]
    layers: tuple[int, ...]
    root: ParameterGroup
    output: int
    tiled_output: bool
    kv_elements: int
    compressed_kv_elements: int

    @cached_property
    def blocks(self) -> list[ParameterGroup]:
        """The group of every block, in order."""
        return [self.kinds[kind] for kind in self.layers]

    @cached_property
    def elements(self) -> int:
        """Parameters in all."""
        return self._sum(lambda group: group.elements)

    @cached_property
    def trained(self) -> int:
        """Parameters that training changes, if the model is trained."""
        return self._sum(lambda group: group.trained.elements)

    @property
    def merged(self) -> int:
        """Parameters of the model after an adapter was merged into it."""
        return self.elements - self.trained if self.adapted else self.elements

    @property
    def experts(self) -> int:
        """Experts of a layer; 0: there are none."""
        return max((kind.experts for kind in self.kinds), default=0)

    def with_experts_divided(self, parts: int) -> ModelShape:
        """The parameters that a rank gathers where so many ranks have the experts together."""
        return replace(self, kinds=tuple(kind.with_experts_divided(parts) for kind in self.kinds))

    @cached_property
    def tied(self) -> bool:
        """True where the output layer is the embedding."""
        return self.output > 0 and self.root.count(self.output) < 2

    @property
    def adapted(self) -> bool:
        """True where an adapter is trained, and the model itself is frozen."""
        return bool(self.root.frozen)

    @property
    def output_gradient(self) -> int:
        """Elements of the gradient of the output layer's weight."""
        return 0 if self.adapted else self.output

    @cached_property
    def embedding(self) -> int:
        """Elements of an embedding that FSDP2 gathers by itself: of one that is not tied."""
        return 0 if self.tied else self.root.largest

    @property
    def output_layer(self) -> int:
        """Elements of an output layer that FSDP2 gathers by itself."""
        return 0 if self.tied else self.output

    @cached_property
    def rest(self) -> int:
        """Elements that stay gathered through a pass: norms, and tied embeddings."""
        return self.root.elements - self.embedding - self.output_layer

    @cached_property
    def largest_block(self) -> int:
        """Elements of the largest block."""
        return max((kind.elements for kind in self.kinds), default=0)

    def shard(self, ranks: int) -> int:
        """Elements on the first rank."""
        return self._sum(lambda group: group.shard(ranks))

    def trained_shard(self, ranks: int) -> int:
        """Elements on the first rank that training changes."""
        return self._sum(lambda group: group.trained.shard(ranks))

    def as_value_model(self) -> ModelShape:
        """The same with a scalar head in place of the output layer."""
        if not self.output:
            return self
        tensors = list(self.root.tensors)
        if not self.tied:
            tensors.remove(next(rows for rows in reversed(tensors) if rows.elements == self.output))
        return replace(self, root=ParameterGroup((*tensors, Rows(1, self.hidden + 1))), output=0)

    def _sum(self, of: Callable[[ParameterGroup], int]) -> int:
        """A number of the parameters outside of blocks and of every block; blocks of one kind have the same."""
        return of(self.root) + sum(self.layers.count(kind) * of(group) for kind, group in enumerate(self.kinds))
