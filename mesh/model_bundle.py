"""The files that a model bundle may hold: configuration, tokenizer and chat templates. No weights, and no code.

Invariant: sender and receiver of a bundle apply the same rules; a receiver checks every name.
"""

from __future__ import annotations

from pathlib import PurePosixPath

SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt", ".tiktoken"})
# In addition to the files at the top, transformers keeps named chat templates in this folder.
TEMPLATES = "additional_chat_templates"
# Indices of weight shards name files that do not travel.
_WEIGHT_INDEX = ".index.json"
MAX_FILE_BYTES = 256 << 20
# Bytes of all files together, and their number: a few large tokenizers, and a template for each use.
MAX_BYTES = 512 << 20
MAX_FILES = 256


def is_bundled(name: str) -> bool:
    """True if a file of this name, relative to the model's folder, belongs to its bundle."""
    path = PurePosixPath(name)
    if path.as_posix() != name or path.suffix not in SUFFIXES or name.endswith(_WEIGHT_INDEX) or "\0" in name:
        return False
    return len(path.parts) == 1 or path.parts[:-1] == (TEMPLATES,)
