"""`config.json` and `generation_config.json` of a folder that is written: those of the source, but for what changed.

Files that transformers writes have less. Settings of sampling in `config.json` are lost, and a model of several parts
becomes its language model alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from rollmesh.learner.model_files.carried_files import CONFIG_FILE, with_code_that_is_kept, write_json
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.mesh.chat.end_tokens import GENERATION_FILE, named_ends

# The second name is that of earlier versions of transformers.
_DTYPES = ("dtype", "torch_dtype")
# The folder from which a model was loaded, and a mark that makes transformers read the settings from config.json.
_OF_ANOTHER_PLACE = ("_name_or_path", "_from_model_config")


def write_settings(out: Path, source: StoredModel, dtype: torch.dtype) -> None:
    """Writes both files.

    Args:
        out: exists.
        source: the model as it was trained, open.
        dtype: of its floating-point tensors.

    Raises:
        OSError: a file cannot be written.
    """
    said = _read(source.folder / CONFIG_FILE)
    if source.model.can_generate():
        generation = source.folder / GENERATION_FILE
        if generation.is_file():
            shutil.copyfile(generation, out / GENERATION_FILE)
        else:
            write_json(out / GENERATION_FILE, _sampling_of(said))
    write_json(out / CONFIG_FILE, _config(said, source, dtype))


def _config(said: Mapping[str, Any], source: StoredModel, dtype: torch.dtype) -> dict[str, Any]:
    model, folder = source.model, source.folder
    if not model.can_generate():
        # A head of another kind has settings of its own.
        config = deepcopy(model.config)
        config.dtype = dtype
        config.architectures = [type(model).__name__]
        return with_code_that_is_kept(json.loads(config.to_json_string()), folder)
    values = deepcopy(_without(with_code_that_is_kept(said, folder), _OF_ANOTHER_PLACE))
    if not source.is_part:
        values["architectures"] = [type(model).__name__]
    if not any(isinstance(values.get(name), str) for name in _DTYPES):
        values[_DTYPES[0]] = ""
    name = str(dtype).removeprefix("torch.")
    # Parts that are not trained keep their tensors, each in its dtype.
    for part in [values, values.get("text_config")] if source.is_part else _sections(values):
        for key in _DTYPES:
            if isinstance(part, dict) and isinstance(part.get(key), str):
                part[key] = name
    return values


def name_ends(folder: Path, ends: Sequence[int]) -> list[int]:
    """Has a written folder name end tokens at which generation stops; returns those that it did not name.

    Args:
        folder: written.
        ends: tokens at which a response stops.

    Raises:
        DataError: it cannot be read.
        OSError: it cannot be written.
    """
    path = folder / GENERATION_FILE
    if not path.is_file():
        return []
    known = named_ends(folder)
    if added := [token for token in ends if token not in known]:
        every = [*known, *added]
        write_json(
            path, _without(_read(path), _OF_ANOTHER_PLACE) | {"eos_token_id": every if len(every) > 1 else every[0]}
        )
    return added


def _sampling_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of generation that a `config.json` has."""
    values: dict[str, Any] = GenerationConfig.from_model_config(deepcopy(dict(said))).to_diff_dict()
    return _without(values, _OF_ANOTHER_PLACE)


def _without(values: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """An object without some keys."""
    return {key: value for key, value in values.items() if key not in keys}


def _sections(values: Any) -> list[dict[str, Any]]:
    """An object and those within it."""
    if not isinstance(values, dict):
        return []
    return [values, *(section for value in values.values() for section in _sections(value))]


def _read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values
