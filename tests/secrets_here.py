"""Secrets of the tests' meshes, in files as a user keeps them; and where they were told to others."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import psutil

TOKEN = "a token of the tests: no one else has it"


def write_secret(path: Path, text: str = TOKEN) -> Path:
    """A file for its owner alone."""
    path.touch(0o600)
    path.write_text(f"{text}\n")
    return path


def files_with(secrets: Collection[str], folder: Path) -> list[str]:
    """The files of a folder in which one of the secrets stands."""
    wanted = [secret.encode() for secret in secrets]
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return [str(path.relative_to(folder)) for path, text in contents.items() if any(one in text for one in wanted)]


def processes_with(secrets: Collection[str], *started: int) -> list[list[str]]:
    """The command lines, of processes that a test has started and of their children, in which a secret stands."""
    parents = [psutil.Process(pid) for pid in started]
    family = [*parents, *(child for parent in parents for child in parent.children(recursive=True))]
    lines = [process.cmdline() for process in family]
    assert all(lines), "each was alive"
    return [line for line in lines if any(secret in argument for argument in line for secret in secrets)]
