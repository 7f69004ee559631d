"""The head of a value model as folders hold it."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.learner.model_files.weight_files import WeightFiles
from rollmesh.mesh.errors import DataError

HEAD = "value_head"
"""Prefix of the names of its weight [1, H] and bias [1]."""
# The second is how Hugging Face names the head of a reward model (sequence classification with one label).
_HEADS_IN_FOLDERS = (HEAD, "score")


def stored_head(files: WeightFiles, name: str, shape: Sequence[int]) -> str | None:
    """The stored tensor that fills a parameter of the head.

    Args:
        files: of the model.
        name: of the parameter, `value_head.weight` or `value_head.bias`.
        shape: of the parameter.

    Returns:
        Its name. None where the folder has no head: it starts at zero, so that every first estimate is exactly 0. Then
        the first advantages are plain returns, and do not depend on a seed.

    Raises:
        DataError: the folder's head does not give one number.
    """
    kind = name.rpartition(".")[2]
    found = [f"{head}.{kind}" for head in _HEADS_IN_FOLDERS if f"{head}.{kind}" in files.stored]
    if not found:
        return None
    if tuple(files.stored[found[0]].shape) != tuple(shape):
        raise DataError(
            f"{files.folder} holds a head of shape {list(files.stored[found[0]].shape)}; a value has one number, "
            f"{list(shape)}",
            hint="choose a model without a head, or with a scalar one",
        )
    return found[0]
