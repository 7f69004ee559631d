"""Secrets of the tests' meshes, in files as a user keeps them."""

from __future__ import annotations

from pathlib import Path

TOKEN = "a token of the tests: no one else has it"


def write_secret(path: Path, text: str = TOKEN) -> Path:
    """A file for its owner alone."""
    path.touch(0o600)
    path.write_text(f"{text}\n")
    return path
