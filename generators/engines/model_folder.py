"""End tokens of a Hugging Face model folder: read without network, and without running its code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase


def eos_ids(folder: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """The generation configuration names the end tokens; else the model's configuration; else the tokenizer."""
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
