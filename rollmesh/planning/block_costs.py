"""Memory of one transformer block, counted on fake tensors: shapes are computed, no byte is allocated.

The forward pass of the whole model brings each kind of block its arguments, while blocks themselves are skipped. Then a
block of each kind runs alone, forward and backward, and torch's tracker gives its largest sum. Two token counts make
a line. Attention is the learner's own over one long sequence, as variable-length kernels need it on CUDA.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from rollmesh.learner.batching.types import Packing, Segments
from rollmesh.learner.engines.fsdp2.attention import ATTENTION
from rollmesh.learner.engines.fsdp2.attention_calls import build_layout
from rollmesh.learner.engines.fsdp2.opaque import Opaque
from rollmesh.learner.engines.fsdp2.packing_choice import choose_packing
from rollmesh.learner.engines.fsdp2.preparation.blocks import transformer_blocks
from rollmesh.learner.engines.fsdp2.preparation.recomputation import is_product
from rollmesh.learner.engines.fsdp2.ulysses.division import refuse_division
from rollmesh.learner.engines.fsdp2.ulysses.exchange import DividedLayout, Exchange
from rollmesh.learner.engines.layer_kinds import layer_kinds
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.planning.architecture import build_on_meta, kinds_of
from rollmesh.planning.shape import BlockCosts, TokenCost

# Far enough apart for the slope, and large enough that gradients of parameters do not hide activations.
_POINTS = (8192, 16384)


def count_block_costs(
    config: PreTrainedConfig, dtype: torch.dtype, sp: int = 1, lora: LoraSection | None = None
) -> tuple[BlockCosts, ...]:
    """The costs of every kind of block, in the order of `ModelShape.kinds`.

    Args:
        config: of the model.
        dtype: compute dtype.
        sp: processes that divide sequences; costs are of one of them, for its own tokens.
        lora: an adapter is trained instead.

    Raises:
        ConfigError: the model's sequences cannot be divided, or there are no layers for an adapter.
    """
    model = build_on_meta(copy.deepcopy(config), lora)
    blocks, places = _one_of_each_kind(model)
    for parameter in model.parameters():
        parameter.data = parameter.to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), grouped_products_by_shape():
        model.to_empty(device="cpu")
        measured = [_count(model, blocks, places, tokens, sp) for tokens in _POINTS]
    return tuple(
        BlockCosts(*(_line(*pair) for pair in zip(few, many, strict=True))) for few, many in zip(*measured, strict=True)
    )


def _line(few: int, many: int) -> TokenCost:
    low, high = _POINTS
    slope = (many - few) / (high - low)
    return TokenCost(few - slope * low, slope)


def _one_of_each_kind(model: Any) -> tuple[list[nn.Module], list[int]]:
    """All blocks, and the places of those to count. The others are skipped, and emptied: they may have many tensors."""
    blocks = transformer_blocks(model)
    kinds, layers = kinds_of(blocks, layer_kinds(model.config))
    places = [layers.index(kind) for kind in range(kinds)]
    for place, block in enumerate(blocks):
        if place not in places:
            block._modules.clear()
            block._parameters.clear()
    return blocks, places


def _count(model: Any, blocks: list[nn.Module], places: list[int], tokens: int, sp: int) -> list[tuple[int, ...]]:
    """Saved, product, working, accumulating and inference bytes of the blocks at some places."""
    calls = _arguments(model, blocks, model_inputs(model, tokens, sp))
    for place in places:
        blocks[place].zero_grad()
    return [_block(blocks[place], *calls[place]) for place in places]


@contextmanager
def grouped_products_by_shape() -> Iterator[None]:
    """Lets experts' grouped products be counted in any dtype, within the context; torch counts bfloat16 alone."""
    real = functional.grouped_mm
    functional.grouped_mm = _by_shape  # type: ignore[assignment]  # restored below
    try:
        yield
    finally:
        functional.grouped_mm = real


class _GroupedProduct(torch.autograd.Function):
    """Allocates and keeps what `torch.nn.functional.grouped_mm` does: [M, K] x [E, K, N] -> [M, N]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, experts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, experts)
        # A product by its name, as selective recomputation looks for.
        return rows.mm(experts[0])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor]:
        rows, experts = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(experts)


def _by_shape(rows: Tensor, experts: Tensor, **_: Any) -> Tensor:
    product: Tensor = _GroupedProduct.apply(rows, experts)
    return product


class _ExchangeByShape(Exchange):
    """Allocates what an exchange between processes does, without them."""

    def __init__(self, parts: int) -> None:
        self.parts, self.part = parts, 0

    def _swap(self, blocks: Tensor) -> Tensor:
        swapped: Tensor = _Swapped.apply(blocks.contiguous())
        return swapped


class _Swapped(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, blocks: Tensor) -> Tensor:
        return torch.empty_like(blocks)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient.contiguous())


def model_inputs(model: Any, tokens: int, sp: int = 1) -> dict[str, Any]:
    """Inputs of a forward pass over one sequence, as the engine makes them; sets the attention that belongs to it.

    Args:
        model: without memory.
        tokens: of the sequence, those of one process.
        sp: processes that divide it.

    Raises:
        ConfigError: it cannot be divided.
    """
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    choice = choose_packing(model)
    if sp > 1 and choice.undivided:
        refuse_division(model.config.model_type, choice.undivided)
    if choice.packing is Packing.ROWS:
        return {"input_ids": ids, "use_cache": False}
    model.set_attn_implementation(ATTENTION)
    segments = Segments(*(np.array([number]) for number in (0, tokens * sp, 0, 0)))
    whole = build_layout(segments, torch.device("cpu"))
    layout = whole if sp == 1 else DividedLayout(whole, _ExchangeByShape(sp))
    return {
        "input_ids": ids,
        "position_ids": torch.arange(tokens)[None],
        "layout": Opaque(layout),
        "use_cache": False,
    }


def _arguments(
    model: nn.Module, blocks: list[nn.Module], inputs: dict[str, Any]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments that each block gets."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    with torch.no_grad(), _skipped(blocks, lambda *args, **kwargs: seen.append((args, kwargs))):
        model(**inputs, logits_to_keep=torch.zeros(1, dtype=torch.int64))
    return seen


@contextmanager
def _skipped(blocks: list[nn.Module], note: Callable[..., None]) -> Iterator[None]:
    """Blocks hand on their input, within the context."""
    forwards = [block.forward for block in blocks]

    def hand_on(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return args[0] if args else kwargs["hidden_states"]

    for block in blocks:
        block.forward = hand_on
    try:
        yield
    finally:
        for block, forward in zip(blocks, forwards, strict=True):
            block.forward = forward


class _Total(TorchDispatchMode):
    """Largest sum of the bytes that exist, as torch's tracker counts it, without its shares of each module.

    Args:
        held: what exists before.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self._known: set[int] = set()
        self._now = self.peak = self.products = 0
        for tensor in held:
            self._add(tensor)

    def _add(self, tensor: Tensor) -> int:
        """Bytes of a storage that was not there before."""
        storage = tensor.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self._known:
            return 0
        self._known.add(address)
        self._now += nbytes
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._end, address, nbytes)
        return nbytes

    def _end(self, address: int, nbytes: int) -> None:
        self._known.remove(address)
        self._now -= nbytes

    def __torch_dispatch__(self, operation: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operation(*args, **(kwargs or {}))
        tensors = output if isinstance(output, (tuple, list)) else (output,)
        added = sum(self._add(tensor) for tensor in tensors if isinstance(tensor, Tensor))
        if is_product(operation):
            # Selective recomputation keeps them.
            self.products += added
        return output


def _block(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    def run(*, gradient: bool) -> _Total:
        hidden = _input_of(args, kwargs).detach().requires_grad_(gradient)
        given_args, given = _with_input(hidden, args, kwargs)
        gradients = (parameter.grad for parameter in block.parameters() if parameter.grad is not None)
        total = _Total((*block.parameters(), *block.buffers(), *gradients, hidden))
        before = total.peak - sum(buffer.nbytes for buffer in block.buffers())
        with total, torch.set_grad_enabled(gradient):
            output = block(*given_args, **given)
            output = output[0] if isinstance(output, tuple) else output
            if gradient:
                output.backward(torch.ones_like(output))
        del output
        # Without parameters, gradients from before, and the input.
        total.peak -= before
        return total

    inference = run(gradient=False)
    saved = _saved(block, args, kwargs)
    working = run(gradient=True).peak
    return saved, inference.products, working, run(gradient=True).peak, inference.peak


def _saved(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes that autograd keeps, parameters and what all blocks share left out."""
    shared = {tensor.untyped_storage()._cdata for tensor in (*block.parameters(), *_tensors(kwargs))}
    found: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in shared:
            # Kept, for the address of one that has ended could come again.
            found[storage._cdata] = (storage.nbytes(), storage)
        return tensor

    hidden = _input_of(args, kwargs).detach().requires_grad_()
    given_args, given = _with_input(hidden, args, kwargs)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block(*given_args, **given)
    return sum(nbytes for nbytes, _ in found.values())


def _input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _with_input(
    hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": hidden})


def _tensors(kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for value in kwargs.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from (item for item in value if isinstance(item, Tensor))
