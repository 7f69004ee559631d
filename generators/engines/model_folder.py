"""End tokens of a Hugging Face model folder: read without network, and without running its code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from rollmesh.mesh.chat.probing import facts_of
from rollmesh.mesh.chat.template import ChatTemplate
from rollmesh.mesh.errors import ChatTemplateError


def eos_ids(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """The end tokens of a model: those that its files declare, and those that end turns by its chat template.

    The generation configuration declares them; else the model's configuration; else the tokenizer.
    """
    declared = _declared(folder, config, tokenizer)
    return tuple(dict.fromkeys((*declared, *_of_template(tokenizer)))) if tokenizer is not None else declared


def _of_template(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """End tokens of turns; that of the tokenizer, if the template writes none."""
    if tokenizer.chat_template is None:
        return []
    try:
        end = facts_of(ChatTemplate.of(tokenizer)).end
    except ChatTemplateError:
        # It is refused by name once a conversation is rendered.
        return []
    known = tokenizer.get_vocab()
    own = () if tokenizer.eos_token is None else (str(tokenizer.eos_token),)
    return [known[token] for token in end.tokens or own if token in known]


def _declared(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    declared: Any = None
    if (folder / "generation_config.json").is_file():
        declared = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    if declared is None:
        declared = getattr(config, "eos_token_id", None)
    if declared is None and tokenizer is not None:
        declared = tokenizer.eos_token_id
    if declared is None:
        return ()
    return tuple(declared) if isinstance(declared, list | tuple) else (int(declared),)
