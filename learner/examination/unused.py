"""Stored tensors that the opened model does not use: a vision tower, layers that predict further tokens.

They are found by what makes the model's tensors, and not by a list of names. Nothing is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from torch import Tensor

from rollmesh.learner.model_files.stored_model import StoredModel


def unused_tensors(source: StoredModel) -> dict[str, Tensor]:
    """The tensors, without memory, by their stored names; `source.files` reads them as they are stored.

    Args:
        source: open.
    """
    return {name: source.files.stored[name] for name in source.plan.unused}


def describe_unused(source: StoredModel) -> str | None:
    """The tensors in words, by the modules that are not used at all; None if there are none.

    Args:
        source: open.
    """
    unused = unused_tensors(source)
    if not unused:
        return None
    groups = Counter(_groups(unused, source.files.stored.keys() - unused.keys()))
    named = ", ".join(f"{group} ({count})" for group, count in groups.items())
    return f"{len(unused)} tensors of {source.folder} are not used by {type(source.model).__name__}: {named}"


def _groups(unused: Iterable[str], used: Collection[str]) -> Iterable[str]:
    """The outermost module around each tensor of which nothing is used; in used layers for all numbers at once."""
    inside = {prefix for name in used for prefix in _prefixes(name)}
    for name in unused:
        prefixes = list(_prefixes(name))
        module = next((prefix for prefix in prefixes if prefix not in inside), None)
        outer = module or name
        numbered = [
            "*" if part.isdigit() and prefix in inside else part
            for part, prefix in zip(outer.split("."), [*prefixes, name], strict=False)
        ]
        yield ".".join([*numbered, "*"] if module else numbered)


def _prefixes(name: str) -> Iterable[str]:
    """The modules around a tensor, the outermost first."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))
