"""The model bundle: the small files with which a generator builds model and tokenizer without a folder of its own."""

from __future__ import annotations

from pathlib import Path

from mesh.errors import DataError

_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt", ".tiktoken"})
# Indices of weight shards name files that do not travel.
_WEIGHT_INDEX = ".index.json"
_MAX_FILE_BYTES = 256 << 20


def read_model_bundle(folder: Path) -> dict[str, bytes]:
    """Configuration, tokenizer and chat template files of a Hugging Face folder, by name; no weights, no code.

    Raises:
        DataError: the folder is missing or has no config.json; a file is too large to be one of these.
    """
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} has no config.json", hint="model.path must be a Hugging Face model folder")
    bundle = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.suffix not in _SUFFIXES or path.name.endswith(_WEIGHT_INDEX):
            continue
        name = path.relative_to(folder).as_posix()
        # Besides the files on top, transformers keeps named chat templates in this folder.
        if "/" in name and not name.startswith("additional_chat_templates/"):
            continue
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise DataError(f"{path} has over {_MAX_FILE_BYTES >> 20} MiB, too much for a configuration file")
        bundle[name] = path.read_bytes()
    return bundle
