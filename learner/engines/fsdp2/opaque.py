"""Values that pass through a sharded model as they are.

FSDP looks into the inputs of the modules that it shards. It rebuilds dataclasses there, and casts the floats in them to
the compute dtype. Temperatures would be rounded, and each layer would get a layout without its masks.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Opaque(Generic[T]):
    """A value into which FSDP does not look: this is no dataclass.

    Args:
        value: which is passed on.
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value
