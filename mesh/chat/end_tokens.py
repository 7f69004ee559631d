"""End tokens of a model's folder: those that its files name, and those with which training ends turns and texts.

The two may differ. A base model's files name the end of a text, and a chat template ends turns with another token.
Responses stop at either, and so does a folder that was written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollmesh.mesh.chat.probing import facts_of
from rollmesh.mesh.chat.template import ChatTemplate
from rollmesh.mesh.errors import ChatTemplateError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

GENERATION_FILE = "generation_config.json"
_NO_ARGUMENTS: tuple[Mapping[str, Any], ...] = ({},)


@dataclass(frozen=True, slots=True)
class EndTokens:
    """End tokens of one folder, by their ids.

    Attributes:
        named: those at which `generate()` of transformers stops; inference engines stop at them too.
        declared: `named`; if there are none, those of the model's configuration, or else the tokenizer's.
        trained: those that end turns by the chat template, and the one that ends texts.
    """

    named: tuple[int, ...]
    declared: tuple[int, ...]
    trained: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        """The tokens at which a response stops."""
        return tuple(dict.fromkeys((*self.declared, *self.trained)))

    @property
    def unnamed(self) -> tuple[int, ...]:
        """Trained ends that stop no response unless they are named."""
        return tuple(token for token in self.trained if token not in self.named)

    def notice(self, tokenizer: PreTrainedTokenizerBase, setting: str) -> str | None:
        """Words about ends that the files do not name; None if they name all.

        Args:
            tokenizer: of the folder.
            setting: key of the configuration that names the folder.
        """
        if not self.unnamed:
            return None
        named = _in_words(tokenizer, self.named) if self.named else "no end token"
        return (
            f"{setting}: its files name {named}, and training ends turns or texts with "
            f"{_in_words(tokenizer, self.unnamed)}. Responses stop at each of them here, and {GENERATION_FILE} of "
            "every folder that is written names them all"
        )


def end_tokens(
    folder: Path,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    arguments: Iterable[Mapping[str, Any]] = _NO_ARGUMENTS,
) -> EndTokens:
    """The end tokens of a model.

    Args:
        folder: of the model.
        config: of it, or of its language model.
        tokenizer: of it; None: it has none.
        arguments: of the chat template, in each set that training uses.

    Raises:
        DataError: a file cannot be read.
    """
    of_config = _ids(getattr(config, "eos_token_id", None)) or _ids(
        getattr(config.get_text_config(), "eos_token_id", None)
    )
    named = of_config
    if (folder / GENERATION_FILE).is_file():
        named = named_ends(folder)
    own = _ids(None if tokenizer is None else tokenizer.eos_token_id)
    trained = () if tokenizer is None else (*_of_template(tokenizer, arguments), *own)
    return EndTokens(named, named or of_config or own, tuple(dict.fromkeys(trained)))


def named_ends(folder: Path) -> tuple[int, ...]:
    """The end tokens that a folder's generation configuration names.

    Args:
        folder: with that file.

    Raises:
        DataError: it cannot be read.
    """
    path = folder / GENERATION_FILE
    try:
        return _ids(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read: {error}", hint="correct it, or remove it: config.json takes its place"
        ) from error


def _of_template(tokenizer: PreTrainedTokenizerBase, arguments: Iterable[Mapping[str, Any]]) -> list[int]:
    """End tokens of turns, of the template for tools too."""
    if tokenizer.chat_template is None:
        return []
    known = tokenizer.get_vocab()
    found: list[int] = []
    for kwargs in arguments:
        for tools in (False, True):
            try:
                end = facts_of(ChatTemplate.of(tokenizer, kwargs, tools=tools)).end
            except ChatTemplateError:
                # It is refused by name once a conversation is rendered.
                continue
            found += [known[token] for token in end.tokens if token in known]
    return found


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(map(int, value)) if isinstance(value, list | tuple) else (int(value),)


def _in_words(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in ids)
