"""Lets SGLang compute with adapters where memory cannot be pinned: it asks for pinned memory without looking.

torch refuses that without an accelerator. Only the modules of adapters see these substitutes. Steps without an adapter
compute with the base alone, as those of some of SGLang's other backends do.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_FACTORIES = frozenset(("empty", "tensor", "zeros"))


class _UnpinnedTorch:
    """torch, with factories that leave `pin_memory` out."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return _without_pinning(found) if name in _FACTORIES else found


def _without_pinning(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*values: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:  # noqa: ARG001  # left out
        return factory(*values, **options)

    return make


def _as_it_is(tensor: torch.Tensor, *_: object) -> torch.Tensor:
    return tensor


def install() -> None:
    """Puts the substitutes in place, before the server starts its processes."""
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    torch.Tensor.pin_memory = _as_it_is  # type: ignore[method-assign, assignment]
    layers.torch = torch_backend.torch = _UnpinnedTorch()
    torch_backend.TorchNativeLoRABackend.skip_inactive_lora_batches = True
