"""Checks, on the files alone, that a model has a place for each token of its tokenizer. No heavy imports.

Models often have more places than there are tokens. Beyond the last place there may be tokens that no prompt holds: a
padding token, or a text model's mark of an image. Neither the chat template nor the tokenizer itself puts such special
tokens into a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollmesh.mesh.errors import DataError

_NAMED = 3


def check_tokenizer(folder: Path, setting: str, places: int) -> None:
    """Refuses a tokenizer with tokens that the model has no embedding for. One without tokenizer.json is left alone.

    Args:
        folder: of the model.
        setting: key of the configuration that names it.
        places: rows of the model's embedding.

    Raises:
        DataError: naming the file and the first of the tokens, or the file is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    try:
        tokenizer, rest = json.loads(path.read_text(encoding="utf-8")), _rest(folder)
        beyond = sorted((place, token) for token, place in _tokens(tokenizer, rest) if place >= places)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{setting}: {path} cannot be read: {error!r}", hint="download or copy it again") from error
    if beyond:
        named = ", ".join(f"{token!r} ({place})" for place, token in beyond[:_NAMED])
        raise DataError(
            f"{setting}: {path} has {len(beyond)} tokens that the model has no embedding for: {named}"
            f"{', ...' * (len(beyond) > _NAMED)}; vocab_size in its config.json is {places}",
            hint="give the folder the tokenizer of this model, or the model a row for each token "
            "(transformers: model.resize_token_embeddings(len(tokenizer)))",
        )


def _tokens(tokenizer: Mapping[str, Any], rest: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The tokens that a prompt may hold, with their places."""
    known = (tokenizer.get("model") or {}).get("vocab") or {}
    places = {piece: place for place, (piece, _) in enumerate(known)} if isinstance(known, list) else dict(known)
    added = {int(place): token for place, token in (rest.get("added_tokens_decoder") or {}).items()}
    added |= {token["id"]: token for token in tokenizer.get("added_tokens") or ()}
    places |= {token["content"]: place for place, token in added.items()}
    written = json.dumps([tokenizer.get("post_processor"), *map(rest.get, ("chat_template", "bos_token", "eos_token"))])
    for token in added.values():
        if token.get("special") and json.dumps(token["content"])[1:-1] not in written:
            del places[token["content"]]
    yield from places.items()


def _rest(folder: Path) -> dict[str, Any]:
    """The tokenizer's configuration, with the template where it has a file of its own."""
    path, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    rest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {**rest, "chat_template": template.read_text(encoding="utf-8")} if template.is_file() else rest
