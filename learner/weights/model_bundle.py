"""The model bundle: the small files with which a generator builds model and tokenizer without a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rollmesh.mesh.chat.end_tokens import GENERATION_FILE
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.model_bundle import MAX_BYTES, MAX_FILE_BYTES, MAX_FILES, is_bundled


def read_model_bundle(folder: Path, ends: Sequence[int] = ()) -> dict[str, bytes]:
    """Configuration, tokenizer and chat template files of a Hugging Face folder, by name; no weights, no code.

    Args:
        folder: of the model.
        ends: tokens at which responses stop, which the bundle names. Arguments of the chat template may decide them,
            and a generator does not know these.

    Raises:
        DataError: the folder is missing or has no config.json; a file is too large to be one of these.
    """
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} has no config.json", hint="model.path must be a Hugging Face model folder")
    bundle = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or not is_bundled(name):
            continue
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"{path} has over {MAX_FILE_BYTES >> 20} MiB, too much for a configuration file")
        bundle[name] = path.read_bytes()
    if len(bundle) > MAX_FILES or sum(map(len, bundle.values())) > MAX_BYTES:
        raise DataError(
            f"{folder} has over {MAX_FILES} configuration files, or over {MAX_BYTES >> 20} MiB of them",
            hint="leave only the files of the model in model.path",
        )
    if ends:
        values = json.loads(bundle.get(GENERATION_FILE, b"{}"))
        bundle[GENERATION_FILE] = json.dumps(values | {"eos_token_id": list(ends)}).encode()
    return bundle
