"""What can be said about a configuration in a moment, before any service is started."""

from __future__ import annotations

import re
from pathlib import Path

from mesh.config.models import Config
from mesh.errors import DataError

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


def check_inputs(config: Config) -> None:
    """Refuses model folders and data files that are not there.

    Raises:
        DataError: names the key and the path.
    """
    model = Path(config.model.path)
    if model.is_dir():
        if not (model / "config.json").is_file():
            raise DataError(
                f"model.path: {model} has no config.json", hint="give a Hugging Face model folder or a hub id"
            )
    elif not _HUB_ID.match(config.model.path):
        raise DataError(f"model.path: no such folder: {model}", hint="give a Hugging Face model folder or a hub id")
    for key, path in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if path is not None and not path.is_file():
            raise DataError(f"{key}: no such file: {path}", hint="give a Parquet or JSONL file")
