"""The files that hold a model's weights: one, or those that an index names. Nothing heavy is imported here."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from rollmesh.mesh.errors import DataError
from rollmesh.mesh.weights.safetensors_format import INDEX_NAME

COPY_AGAIN = "download or copy the folder again"
"""Hint for a file that is damaged or missing."""
SINGLE_NAME = "model.safetensors"
"""Name of the file where a folder has one."""


def weight_file_names(folder: Path, setting: str = "") -> list[str]:
    """The files in order, relative to the folder; they need not be there.

    Args:
        folder: of the model.
        setting: key of the configuration that names it, where there is one.

    Raises:
        DataError: there is no file and no index; or the index cannot be read, or names a file outside of its folder.
    """
    index, where = folder / INDEX_NAME, f"{setting}: " if setting else ""
    if index.is_file():
        return _names_in_index(index, f"{where}{index}")
    if (folder / SINGLE_NAME).is_file():
        return [SINGLE_NAME]
    raise DataError(
        f"{where}{folder} has no weights: neither {SINGLE_NAME} nor {INDEX_NAME}",
        hint="weights in other formats are not read: save the model again with transformers' save_pretrained",
    )


def _names_in_index(index: Path, label: str) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [PurePosixPath(name) for name in names]
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(f"{label} cannot be read: {error!r}", hint=COPY_AGAIN) from error
    for name, path in zip(names, paths, strict=True):
        if path.is_absolute() or ".." in path.parts:
            raise DataError(
                f"{label} names {name!r}, a file outside of the model's folder",
                hint="copy that file into the folder, and name it in the index without a path",
            )
    return names
