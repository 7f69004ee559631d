"""Megatron-Core without CUDA: what its code asks of CUDA is answered by the CPU. Not imported by a learner on CUDA.

Megatron-Core 0.16.1 names CUDA in factories (`device="cuda"`), in checks of tensor types, for streams and for the
states of random generators. Its arithmetic needs none of it. `import_on_cpu` changes what Megatron alone sees. `on_cpu`
changes torch for the time of a call into Megatron, so that other engines of the process never meet it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rollmesh.learner.engines.megatron.local.rotation import rotate_packed

_CPU = torch.device("cpu")


class _NoStream:
    """A stream of a device that computes in order; a class, for annotations name it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        return lambda *_, **__: _NoStream()


class _NoGenerators:
    """Megatron's tracker of CUDA generators: nothing here draws random numbers."""

    def is_initialized(self) -> bool:
        return True

    @contextlib.contextmanager
    def fork(self, name: str | None = None) -> Iterator[None]:
        del name
        yield

    def get_states(self) -> dict[str, Tensor]:
        return {}

    def set_states(self, states: dict[str, Tensor]) -> None:
        pass


class _CpuFactories(TorchFunctionMode):
    """Tensors that are asked for on CUDA are made on the CPU. Every call of torch passes here: it must cost little."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs:
            return func(*args)
        if "device" in kwargs or "pin_memory" in kwargs:
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = _CPU
        return func(*args, **kwargs)


class _CudaTypes(_CpuFactories):
    """Tensors also say that they are on CUDA, by which Megatron's optimizer recognizes masters."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.type and len(args) == 1 and not kwargs:
            found: str = func(*args)
            # Another one of these may have answered already.
            return found if ".cuda." in found else found.replace("torch.", "torch.cuda.", 1)
        return super().__torch_function__(func, types, args, kwargs)


_ANSWERS: tuple[tuple[Any, str, Any], ...] = (
    (torch.cuda, "current_device", lambda: _CPU),
    (torch.cuda, "synchronize", lambda *_, **__: None),
    (torch.cuda, "Stream", _NoStream),
    (torch.cuda, "current_stream", lambda *_, **__: _NoStream()),
    (torch.cuda, "default_stream", lambda *_, **__: _NoStream()),
    (torch.cuda, "stream", lambda *_, **__: contextlib.nullcontext()),
    (Tensor, "cuda", lambda self, *_, **__: self),
)
_INHERITED = object()


@contextlib.contextmanager
def on_cpu(*, types: bool = False) -> Iterator[None]:
    """Runs Megatron's code on the CPU; may be nested.

    Args:
        types: float32 tensors say that they are on CUDA, for the optimizer's code.
    """
    # Several times in a step: `unittest.mock` would take longer than some of the calls.
    before = [vars(of).get(name, _INHERITED) for of, name, _ in _ANSWERS]
    for of, name, answer in _ANSWERS:
        setattr(of, name, answer)
    try:
        with _CudaTypes() if types else _CpuFactories():
            yield
    finally:
        for (of, name, _), answer in zip(_ANSWERS, before, strict=True):
            delattr(of, name) if answer is _INHERITED else setattr(of, name, answer)


@functools.cache
def import_on_cpu() -> None:
    """Imports Megatron-Core for the CPU, before anything else does; repeating it is harmless."""
    # Its small functions would be compiled, which takes longer here than all of their calls.
    with patch.object(torch, "compile", lambda function=None, **_: function or (lambda inner: inner)), on_cpu():
        from megatron.core.distributed import param_and_grad_buffer
        from megatron.core.models.common.embeddings import rope_utils
        from megatron.core.tensor_parallel import layers, mappings, random
        from megatron.core.transformer.moe import moe_utils, token_dispatcher
    random._CUDA_RNG_STATE_TRACKER = _NoGenerators()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None
    # The name is missing without Transformer Engine, and asked for all the same.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host
    rope_utils._apply_rotary_pos_emb_thd = rotate_packed
    for module in (layers, mappings, param_and_grad_buffer):
        # Torch 2.13 warns of the former names at every call.
        module.dist_all_gather_func = _among_several(getattr(dist, "all_gather_single", dist.all_gather_into_tensor))
        module.dist_reduce_scatter_func = _among_several(
            getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        )
    mappings._gather_along_first_dim = _gather_uneven(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = _scatter_uneven(mappings._reduce_scatter_along_first_dim)


def _on_host(values: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron moves split sizes to the host only from CUDA."""
    del record_stream
    return values.numpy() if as_numpy and torch.is_tensor(values) else values


def _among_several(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A process by itself has its result already, where gloo would copy all bytes twice."""

    def call(result: Tensor, values: Tensor, *, group: Any, **options: Any) -> Any:
        if group.size() > 1 or result.data_ptr() != values.data_ptr():
            return collective(result, values, group=group, **options)
        return None

    return call


def _gather_uneven(even: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Gathers parts of different lengths, which gloo cannot: all are padded to the longest."""

    def gather(values: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even(values, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        longest = max(*sizes, 1)
        padded = values.new_zeros(longest, *values.shape[1:])
        padded[: len(values)] = values
        gathered = values.new_empty(longest * len(sizes), *values.shape[1:])
        dist.all_gather_into_tensor(gathered, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(gathered.split(longest), sizes, strict=True)])

    return gather


def _scatter_uneven(even: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Sums, and scatters parts of different lengths, which gloo cannot: all get the sum, and keep their part."""

    def scatter(values: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even(values, group, input_split_sizes, use_global_buffer)
        summed = values.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return summed.split([int(size) for size in input_split_sizes])[group.rank()].contiguous()

    return scatter
