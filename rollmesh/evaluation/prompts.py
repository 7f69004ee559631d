"""Prompts of a user's, from texts, JSON lines or a file, as a file of data: no reward needs anything of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from rollmesh.mesh.errors import DataError
from rollmesh.mesh.files import write_atomically

_JSON_LINES = (".jsonl", ".json", ".ndjson")
_SOURCE = "prompts"
# `str.splitlines` would also end a line where a text has U+2028 and the like.
_END = "\n"

Prompt = str | list[dict[str, Any]]
"""A text, or chat messages."""


def read_prompts(path: Path, prompt_key: str) -> list[Prompt]:
    """The prompts in a file: of JSON lines each a text or an object with the prompt; else each line is a prompt.

    Args:
        path: the file.
        prompt_key: of an object's prompt.

    Raises:
        DataError: unreadable.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint="give a text file, or JSON lines") from error
    if path.suffix in _JSON_LINES:
        return parse_prompts(text, str(path), prompt_key)
    return [line for line in text.split(_END) if line.strip()]


def parse_prompts(text: str, origin: str, prompt_key: str) -> list[Prompt]:
    """The prompts in JSON lines, each a text or an object with the prompt.

    Args:
        text: the lines.
        origin: of them, for errors.
        prompt_key: of an object's prompt.

    Raises:
        DataError: a line holds no prompt.
    """
    prompts: list[Prompt] = []
    for number, line in enumerate(text.split(_END), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            prompt = value[prompt_key] if isinstance(value, dict) else value
        except (ValueError, KeyError, RecursionError) as error:
            raise DataError(
                f"{origin}, line {number} holds no prompt: {type(error).__name__}: {error}",
                hint=f'write "text" or {{"{prompt_key}": "text"}} on each line',
            ) from error
        if not isinstance(prompt, str | list):
            raise DataError(f"{origin}, line {number}: a prompt is a text or a list of chat messages")
        prompts.append(prompt)
    return prompts


def write_prompts(prompts: Iterable[Prompt], folder: Path, *, chat: bool) -> Path:
    """Writes prompts as a file of data and returns its path, which follows from their content.

    Args:
        prompts: at least one.
        folder: of the file.
        chat: a text becomes a user's message, so that the chat template applies.

    Raises:
        DataError: there are none, or the disk refuses.
    """
    lines = []
    for prompt in prompts:
        as_messages = chat and isinstance(prompt, str)
        row = {
            "prompt": [{"role": "user", "content": prompt}] if as_messages else prompt,
            "data_source": _SOURCE,
            "reward_model": {"ground_truth": ""},
        }
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    if not lines:
        raise DataError("there are no prompts", hint="give --prompt TEXT, or a file with --prompts")
    text = "".join(lines)
    path = folder / f"prompts-{xxhash.xxh3_64(text.encode()).hexdigest()}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}", hint="free space, or set TMPDIR") from error
    return path
