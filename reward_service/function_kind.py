"""Needs of reward functions: which parts of items they read, and whether an item needs its group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

WANTS = frozenset({"ids", "messages", "offsets", "turns", "images"})
"""Parts of items that are left out unless they are wanted: `response_ids`, `messages`, `token_ends`, `turns`, and
`image_contents`."""


@dataclass(frozen=True, slots=True)
class FunctionKind:
    """A function's description for those that cannot call it.

    Attributes:
        whole_group: it is given all items of a group that a request holds.
        asynchronous: it is a coroutine function.
        wants: names of `WANTS` that it reads.
        deterministic: equal items get equal outcomes.
        needs_group: an item's outcome may depend on others of its group.
    """

    whole_group: bool
    asynchronous: bool
    wants: tuple[str, ...] = ()
    deterministic: bool = False
    needs_group: bool = False


@dataclass(frozen=True, slots=True)
class Needs:
    """Needs of several functions together; see `FunctionKind`."""

    wants: frozenset[str]
    deterministic: bool
    needs_group: bool

    @classmethod
    def of(cls, kinds: Iterable[FunctionKind | None]) -> Self:
        """Needs of functions by their kinds; None: one that is not known yet, and may read tokens."""
        listed = list(kinds)
        known = [kind for kind in listed if kind is not None]
        wants = frozenset(want for kind in known for want in kind.wants)
        return cls(
            wants if len(known) == len(listed) else wants | {"ids"},
            len(known) == len(listed) and all(kind.deterministic for kind in known),
            any(kind.needs_group for kind in known),
        )
