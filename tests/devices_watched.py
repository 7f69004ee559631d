"""Notes who asks torch about devices, from this import to that of `tests.devices_unwatched`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CALLED: list[str] = []
"""Names of the functions that were called."""
REAL: list[tuple[Any, str, Callable[..., Any]]] = []
"""Where functions are watched: owner, name, and the function itself."""


def _watch(owner: Any, name: str) -> None:
    found = getattr(owner, name)

    def asked(*arguments: Any, **options: Any) -> Any:
        CALLED.append(name)
        return found(*arguments, **options)

    setattr(owner, name, asked)
    REAL.append((owner, name, found))


for _name in ("is_available", "device_count", "_lazy_init"):
    _watch(torch.cuda, _name)
if hasattr(torch._C, "_cuda_getDeviceCount"):  # not in a build for CPUs
    _watch(torch._C, "_cuda_getDeviceCount")
