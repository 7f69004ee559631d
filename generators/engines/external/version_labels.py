"""Policy versions by the label under which an external engine loaded them.

Invariants: a label names a version whose weights were loaded. A token with any other label is the engine's failure:
nothing is guessed. Labels are ordered by their loading, and a response never goes back to an earlier one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from rollmesh.generators.engines.errors import EngineError
from rollmesh.mesh.trajectory.versions import PolicyVersion

# A token comes with the label of its weights within seconds: after this many swaps no token of an older label is on its
# way.
_KEPT = 64


def label_of(version: PolicyVersion) -> str:
    """Text of a version: digits and a dot, `incarnation.version`."""
    return f"{version.incarnation}.{version.version}"


class VersionLabels:
    """The labels given to one engine."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[int, PolicyVersion]] = OrderedDict()
        self._loaded = 0

    def add(self, version: PolicyVersion) -> None:
        """Adds the version of the weights that the engine has from here on."""
        self._loaded += 1
        label = label_of(version)
        self._known[label] = (self._loaded, version)
        self._known.move_to_end(label)
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)

    def rename(self, version: PolicyVersion) -> None:
        """Names the weights that were loaded last by another version; the engine keeps their label."""
        self._loaded += 1
        self._known[next(reversed(self._known))] = (self._loaded, version)

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
                hint="does another program load weights into it?",
            ) from None


def first_runs(runs: Sequence[tuple[int, str]], tokens: int) -> list[tuple[int, str]]:
    """Runs (length, label) over the first tokens alone."""
    first = []
    for length, label in runs:
        first.append((min(length, tokens), label))
        tokens -= first[-1][0]
        if not tokens:
            break
    return first
