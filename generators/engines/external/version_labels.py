"""Versions as an engine of its own knows them: by the label that was given with the weights.

Invariants: a label names a version whose weights were loaded; a stamp with any other is the engine's failure, and no
guess is made at it. Labels have an order, that of their loading, along which a response only goes on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from rollmesh.generators.engines.interface import EngineError
from rollmesh.mesh.trajectory.versions import PolicyVersion

# A token comes with the label of its weights within seconds: so many swaps later none of an older one is on its way.
_KEPT = 64


def label_of(version: PolicyVersion) -> str:
    """Text of a version: digits and a dot, `incarnation.version`."""
    return f"{version.incarnation}.{version.version}"


class VersionLabels:
    """The labels given to one engine."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[int, PolicyVersion]] = OrderedDict()
        self._loaded = 0

    def loaded(self, version: PolicyVersion) -> None:
        """Weights of this version are in the engine from here on."""
        self._loaded += 1
        label = label_of(version)
        self._known[label] = (self._loaded, version)
        self._known.move_to_end(label)
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)

    def __getitem__(self, label: str) -> tuple[int, PolicyVersion]:
        """(Order, version) of a label.

        Raises:
            EngineError: the engine stamps tokens with a version that it was not given.
        """
        try:
            return self._known[label]
        except KeyError:
            newest = next(reversed(self._known), "none")
            raise EngineError(
                f"the engine stamps tokens with version {label!r}, which it was not given (last: {newest!r})",
                hint="does somebody else load weights into it?",
            ) from None


def first_runs(runs: Sequence[tuple[int, str]], tokens: int) -> list[tuple[int, str]]:
    """Runs (length, label) over the first tokens alone."""
    found = []
    for length, label in runs:
        found.append((min(length, tokens), label))
        tokens -= found[-1][0]
        if not tokens:
            break
    return found
