"""Keys of prompts, by which the same prompt is found again."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from rollmesh.learner.data.images import ImageSource

# Signs that are written or left out without another meaning. Those of mathematics are not among them.
_SIGNS = str.maketrans("", "", "\"'`$.,;:!?")

Prompt = str | Sequence[Mapping[str, Any]]


def exact_key(prompt: Prompt, images: Sequence[ImageSource] = ()) -> int:
    """A digest of a prompt as it is written; images count by their bytes, or by their path."""
    return _digest(_text(prompt), images)


def normalized_key(prompt: Prompt, images: Sequence[ImageSource] = ()) -> int:
    """The same, whatever its case, white space and punctuation."""
    text = unicodedata.normalize("NFKC", _text(prompt)).casefold().translate(_SIGNS)
    return _digest("".join(text.split()), images)


def _digest(text: str, images: Sequence[ImageSource]) -> int:
    digest = xxhash.xxh3_128(text.encode("utf-8", "surrogatepass"))
    for image in images:
        digest.update(str(image).encode() if isinstance(image, Path) else image)
    return digest.intdigest()


def _text(prompt: Prompt) -> str:
    """The texts of a prompt; who says them does not count."""
    return prompt if isinstance(prompt, str) else "\n".join(map(_said, prompt))


def _said(message: Mapping[str, Any]) -> str:
    content = message["content"] or ""
    text = content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)
    calls = message.get("tool_calls")
    return text + json.dumps(calls, default=str) if calls else text
