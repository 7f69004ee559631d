"""Stands in for the package of CUDA kernels, which does not exist for a CPU.

SGLang imports some of its functions by name where it runs on a CPU too, and never calls them there. Every name can be
had; calling it says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """A function of that name that cannot be called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel; this server runs on a CPU without it")

    missing.__name__ = name
    return missing
