"""Adapters within Megatron's layers: W x + s B A x, computed next to a layer whose weight is frozen.

A hook adds the products to the layer's output. Where rows of W are divided, A is whole on every process of a
tensor-parallel group, and each has its rows of B. Where columns of W are divided, each has its columns of A, and B is
whole. Either way the processes exchange the `rank` numbers that a token has between A and B.

Sources: Hu et al. 2021, arXiv:2106.09685; the exchanges are those of arXiv:2205.05198.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn
from torch.nn.functional import linear

from rollmesh.learner.engines.megatron.adapters.rules import CHILD, AdaptedLayer, short_name
from rollmesh.learner.engines.megatron.weight_rules import Form
from rollmesh.mesh.config.lora import LoraSection


class Factors(nn.Module):
    """The two matrices of one adapter, this process's part of them.

    Args:
        like: the layer's weight, for dtype and device.
        rank: of the product.
        inputs, outputs: of this process.
    """

    def __init__(self, like: Tensor, rank: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.a = nn.Parameter(like.new_empty(rank, inputs))
        self.b = nn.Parameter(like.new_empty(outputs, rank))

    def forward(self) -> tuple[Tensor, Tensor]:
        """A and B. Megatron's hooks of a call wait for parameters that still travel."""
        return self.a, self.b


class LayerAdapters(nn.ModuleDict):
    """The adapters of one Megatron layer, by the short name of the Hugging Face layer.

    Args:
        factors: of the chosen ones.
        scale: of the products.
        config: Megatron's.
        group: the tensor-parallel one.

    Attributes:
        enabled: they are computed.
    """

    def __init__(self, factors: dict[str, Factors], scale: float, config: Any, group: Any) -> None:
        super().__init__(factors)
        self._scale, self._group = scale, group
        self._sequence_parallel: bool = config.sequence_parallel
        self.enabled = True
        for found in factors.values():
            divided, axis, whole = self._divided(found)
            set_tensor_model_parallel_attributes(divided, True, axis, 1)
            # Each process has the gradient of its own tokens then, and Megatron sums what has this mark.
            whole.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron's mark

    def add_products(self, _layer: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """The hook: Megatron's layers give their output and a bias."""
        if not self.enabled:
            return output
        found, bias = output
        return found + self._scale * self._products(args[0]), bias

    @staticmethod
    @abstractmethod
    def _divided(factors: Factors) -> tuple[nn.Parameter, int, nn.Parameter]:
        """The matrix that is divided over the processes, its divided dimension, and the other matrix."""

    @abstractmethod
    def _products(self, states: Tensor) -> Tensor:
        """B A x of this process's outputs."""


class RowAdapters(LayerAdapters):
    """Adapters of a layer that several Hugging Face layers make up, with rows of each on every process.

    Args:
        factors, scale, config, group: see `LayerAdapters`.
        widths: outputs of this process by short name, of those without adapter too, in their order.
        groups: query groups of this process, whose rows alternate; 1: the layers follow one another.
    """

    def __init__(
        self, factors: dict[str, Factors], scale: float, config: Any, group: Any, *, widths: dict[str, int], groups: int
    ) -> None:
        super().__init__(factors, scale, config, group)
        self._widths, self._groups = widths, groups

    @staticmethod
    def _divided(factors: Factors) -> tuple[nn.Parameter, int, nn.Parameter]:
        return factors.b, 0, factors.a

    def _products(self, states: Tensor) -> Tensor:
        factors = {name: found() for name, found in self.items()}
        hidden = linear(states, torch.cat([a for a, _ in factors.values()]))
        if self._sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self._group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self._group)
        given = dict(zip(factors, hidden.chunk(len(factors), -1), strict=True))
        parts = [
            linear(given[name], factors[name][1]) if name in factors else hidden.new_zeros(*hidden.shape[:-1], width)
            for name, width in self._widths.items()
        ]
        return torch.cat([part.unflatten(-1, (self._groups, -1)) for part in parts], -1).flatten(-2)


class ColumnAdapters(LayerAdapters):
    """The adapter of a layer with columns on every process."""

    @staticmethod
    def _divided(factors: Factors) -> tuple[nn.Parameter, int, nn.Parameter]:
        return factors.a, 1, factors.b

    def _products(self, states: Tensor) -> Tensor:
        (factors,) = self.values()
        a, b = factors()
        hidden = linear(states, a)
        if self._sequence_parallel:
            hidden = reduce_scatter_to_sequence_parallel_region(hidden, group=self._group)
        else:
            hidden = reduce_from_tensor_model_parallel_region(hidden, group=self._group)
        return linear(hidden, b)


def add_adapters(chunks: Sequence[GPTModel], layers: Sequence[AdaptedLayer], section: LoraSection) -> None:
    """Adds adapters to the layers of this process, without values; nothing else in these is trained from then on.

    Args:
        chunks: this process's parts of the model.
        layers: that get some.
        section: of the configuration.
    """
    group = ProcessGroupCollection.use_mpu_process_groups().tp
    for chunk in chunks:
        chunk.requires_grad_(False)
        for block in chunk.decoder.layers:
            modules = dict(block.named_modules())
            for layer in layers:
                # Layers with experts have no such one.
                if (module := modules.get(layer.module)) is not None:
                    adapters = _adapters_of(module, layer, section, chunk.config, group)
                    module.add_module(CHILD, adapters)
                    module.register_forward_hook(adapters.add_products)
        if chunk.pre_process and chunk.config.recompute_granularity == "full":
            # Megatron's recomputation has gradients only where an input has one.
            chunk.embedding.register_forward_hook(_require_gradient)


def adapter_modules(chunks: Iterable[nn.Module]) -> Iterator[LayerAdapters]:
    """The adapters of all layers."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, LayerAdapters))


@contextmanager
def without_adapters(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Computes the base alone within the context."""
    found = list(adapter_modules(chunks))
    for adapters in found:
        adapters.enabled = False
    try:
        yield
    finally:
        for adapters in found:
            adapters.enabled = True


def _adapters_of(module: Any, layer: AdaptedLayer, section: LoraSection, config: Any, group: Any) -> LayerAdapters:
    rows, columns = module.weight.shape
    if layer.divides_inputs:
        (source,) = layer.chosen
        factors = {short_name(source): Factors(module.weight, section.rank, columns, rows)}
        return ColumnAdapters(factors, section.scale, config, group)
    groups, widths = 1, dict.fromkeys(map(short_name, layer.sources), rows // len(layer.sources))
    if layer.form is Form.QKV:
        groups = config.num_query_groups // config.tensor_model_parallel_size
        key = groups * config.kv_channels
        widths = dict(zip(widths, (rows - 2 * key, key, key), strict=True))
    factors = {
        name: Factors(module.weight, section.rank, columns, widths[name]) for name in map(short_name, layer.chosen)
    }
    return RowAdapters(factors, section.scale, config, group, widths=widths, groups=groups)


def _require_gradient(_module: nn.Module, _args: Any, states: Tensor) -> Tensor:
    return states.requires_grad_() if torch.is_grad_enabled() and not states.requires_grad else states
