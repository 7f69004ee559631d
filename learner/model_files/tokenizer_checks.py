"""Checks that a model has a place for each token, and a role the actor's. No heavy imports.

Models often have more places than there are tokens. Beyond the last place there may be tokens that no text holds: a
padding token, or a text model's mark of an image. The chat template and the tokenizer itself must not write them. A row
that still holds one is refused where it is read. Other special tokens, as marks of tools, come in responses.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.mesh.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILE = "tokenizer.json"
_MEDIA = re.compile(r"image|img|vision|video|audio|speech", re.IGNORECASE)
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
    tokens = _read_tokens(folder, setting)
    if tokens is not None:
        _refuse_beyond(tokens, f"{setting}: {folder / _FILE}", places)


def check_loaded_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, setting: str, places: int) -> None:
    """The same of a tokenizer whose tokens are in other files, as transformers has opened it.

    Args:
        tokenizer: of the folder.
        folder, setting, places: see `check_tokenizer`.

    Raises:
        DataError: naming the folder and the first of the tokens.
    """
    if (folder / _FILE).is_file():
        return
    special = frozenset(
        token.content for token in tokenizer.added_tokens_decoder.values() if token.special
    ) | frozenset(tokenizer.all_special_tokens)
    written = [tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token]
    tokens = _Tokens(tokenizer.get_vocab(), special, json.dumps(written), frozenset([tokenizer.pad_token]))
    _refuse_beyond(tokens, f"{setting}: the tokenizer in {folder}", places)


def _refuse_beyond(tokens: _Tokens, label: str, places: int) -> None:
    if beyond := sorted((place, token) for token, place in tokens.in_texts().items() if place >= places):
        named = ", ".join(f"{token!r} ({place})" for place, token in beyond[:_NAMED])
        raise DataError(
            f"{label} has {len(beyond)} tokens that the model has no embedding for: {named}"
            f"{', ...' * (len(beyond) > _NAMED)}; vocab_size in its config.json is {places}",
            hint="give the folder the tokenizer of this model, or the model a row for each token "
            "(transformers: model.resize_token_embeddings(len(tokenizer)))",
        )


def check_same_tokens(actor: Path, role: Path, setting: str, places: int | None) -> None:
    """Refuses a role's model that reads the actor's token ids as other tokens, or has no embedding for one.

    Further tokens of the role do not matter. A folder without tokenizer.json is compared by its embeddings alone.

    Args:
        actor: folder of the actor's model.
        role: folder of the role's model.
        setting: key of the configuration that names it.
        places: rows of the role's embedding; None: not known.

    Raises:
        DataError: naming the first of the tokens, or a file is damaged.
    """
    expected, found = _read_tokens(actor, "model.path"), _read_tokens(role, setting)
    if expected is None:
        return
    own = None if found is None else found.places
    other = sorted(
        (place, token)
        for token, place in expected.in_prompts().items()
        if (places is not None and place >= places) or (own is not None and own.get(token) != place)
    )
    if other:
        place, token = other[0]
        here = place if own is None else own.get(token, "absent")
        raise DataError(
            f"{setting}: {role} has other tokens than model.path: {len(other)} differ. The first is {token!r}: {place} "
            f"there, {here} here{'' if places is None else f', where {places} tokens have an embedding'}",
            hint="the learner gives the same token ids to all models: choose one with the tokenizer of model.path",
        )


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a tokenizer.

    Attributes:
        places: by token.
        special: tokens that no text holds unless something or someone puts them there.
        written: all that puts some there in any case, as JSON.
        pads: those to pad with.
    """

    places: Mapping[str, int]
    special: Collection[str]
    written: str
    pads: Collection[str | None]

    def in_prompts(self) -> dict[str, int]:
        """Those that template and tokenizer put into prompts, and those of plain text, with their places."""
        return {token: place for token, place in self.places.items() if self._is_plain(token)}

    def in_texts(self) -> dict[str, int]:
        """Those that rows, tools or responses may hold, with their places: marks of tools and thoughts too."""
        return {
            token: place
            for token, place in self.places.items()
            if self._is_plain(token) or not (token in self.pads or _MEDIA.search(token))
        }

    def _is_plain(self, token: str) -> bool:
        return token not in self.special or json.dumps(token)[1:-1] in self.written


def _read_tokens(folder: Path, setting: str) -> _Tokens | None:
    """The tokens of a folder; None without tokenizer.json.

    Raises:
        DataError: a file is damaged.
    """
    path = folder / _FILE
    if not path.is_file():
        return None
    try:
        tokenizer, rest = json.loads(path.read_text(encoding="utf-8")), _rest(folder)
        known = (tokenizer.get("model") or {}).get("vocab") or {}
        places = {piece: place for place, (piece, _) in enumerate(known)} if isinstance(known, list) else dict(known)
        added = {int(place): token for place, token in (rest.get("added_tokens_decoder") or {}).items()}
        added |= {token["id"]: token for token in tokenizer.get("added_tokens") or ()}
        places |= {token["content"]: place for place, token in added.items()}
        places = {token: operator.index(place) for token, place in places.items()}
        special = frozenset(token["content"] for token in added.values() if token.get("special"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{setting}: {path} cannot be read: {error!r}", hint="download or copy it again") from error
    sources = map(rest.get, ("chat_template", "bos_token", "eos_token"))
    pad = rest.get("pad_token")
    pads = frozenset([pad.get("content") if isinstance(pad, dict) else pad])
    return _Tokens(places, special, json.dumps([tokenizer.get("post_processor"), *sources]), pads)


def _rest(folder: Path) -> dict[str, Any]:
    """The tokenizer's configuration, with the template where it has a file of its own."""
    path, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    rest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {**rest, "chat_template": template.read_text(encoding="utf-8")} if template.is_file() else rest
