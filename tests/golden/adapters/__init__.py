"""Adapters: how a peer's recorded case is computed with our functions. One module per family."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from tests.golden.case import Adapter

ADAPTERS: dict[tuple[str, str, str], Adapter] = {}


def adapter(family: str, peer: str, *names: str) -> Callable[[Adapter], Adapter]:
    """Decorator: computes the cases of these names."""

    def enter(function: Adapter) -> Adapter:
        for name in names:
            assert (family, peer, name) not in ADAPTERS, (family, peer, name)
            ADAPTERS[family, peer, name] = function
        return function

    return enter


def load_adapters() -> dict[tuple[str, str, str], Adapter]:
    """All adapters."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return ADAPTERS
