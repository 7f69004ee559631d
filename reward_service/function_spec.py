"""A reward function as it is named in a list: by its name or path, or as the function itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollmesh.mesh.user_code import label

FunctionSpec = str | Callable[..., Any]
# Begins the names of rewards of environments.
VERIFIERS = "verifiers:"


def label_of(spec: FunctionSpec) -> str:
    """The short name of a function, which is that of its part unless this is given another one."""
    return label(spec) if isinstance(spec, str) else str(getattr(spec, "__name__", type(spec).__name__))
